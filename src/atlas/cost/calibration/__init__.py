"""Measured runs and what they teach: `kernels` (seconds of a layer from a GPU's calibration), `runs` (a whole iteration
in closed form, and as Costs for the simulator), `fit` (few constants from many runs), `footprint` (peak memory).

Import the module you need. Nothing here holds a measurement: the files stay where they are, `bench/accuracy_*.py`
read them and print the constants that a GPU entry carries.
"""

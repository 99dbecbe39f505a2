"""What a job costs: `price` (nanoseconds of every op and transfer), `memory` (bytes of every stage), `arrange` (what
the user left out), from FLOPs and bytes or from a measured `profile`. `table` is the form the engines read.

Import the module you need: this package stays empty so that importing `cost.table` does not import the code for job
files.
"""

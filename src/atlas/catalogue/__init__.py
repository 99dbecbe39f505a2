"""What is publicly known of cloud regions and models before anything is measured: prior figures, with their sources.

Reads the tables in `data/`, which `rebuild` makes from public files. Knows no job and no plan.
"""

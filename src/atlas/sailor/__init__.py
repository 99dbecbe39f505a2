"""Sailor (SOSP'25): its files, its judge, and our search under that judge.

    read_inputs(...)       the files it plans from, unchanged         inputs, links
    judge(inputs, plan)    its iteration time and money               judge, money
    check(inputs, plan)    is the plan one that could run             check
    search(inputs, ...)    the best plan by that judge                search, and the modules it imports
    read_plan, write_plan  its plan format                            plan_file
    simulated(...)         our event simulation of it                 events

A plan takes a second or two of CPU: nothing but numpy to import, nothing to compile.
"""

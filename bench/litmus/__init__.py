"""A litmus of the ordering between processes on GPUs: data before word, wrap, many streams, a dead or frozen producer.

Run as ``python -m bench.litmus``; ``--product`` asks the product's own calls the same.  The process that drives it
never touches a GPU: every role is a child of its own, every part has a watchdog, and no child outlives the run.
"""

"""Images in, batches of NumPy arrays out: synthesis, ingest through Spark, reading with Petastorm.

`synth` paints images. `ingest` converts class folders into a Petastorm data set. `dataset` opens
and verifies one. `reading` gives each rank exactly the samples that `plan.sample_order` names.
Nothing here imports torch; only `ingest*` imports pyspark.
"""

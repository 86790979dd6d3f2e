"""Photos in, batches of numpy arrays out: synthesis, ingest through Spark, Petastorm reading.

`synth` paints photos, `ingest` turns class folders into a Petastorm data set, `dataset` opens one
and vouches for it, `reading` feeds a rank exactly the samples that `plan.schedule` names. Nothing
here knows torch; pyspark is met only in `ingest*`.
"""

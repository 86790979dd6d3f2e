"""SparkNet's way: rounds of local steps in ordinary tasks, and weights averaged between them.

Moritz, Nishihara, Stoica, Jordan: SparkNet: Training Deep Networks in Spark, ICLR 2016, algorithm
1: the driver broadcasts the weights, each worker takes τ steps of SGD on its own data, the driver
averages what they come to. Two things are decided here that the paper leaves to Caffe:

- The momentum of the optimiser is averaged with the weights and travels along, which doubles what
  is sent. A task of Spark has no memory that it may rely on, so it cannot keep its own (as
  SparkNet's Caffe workers and torch's PostLocalSGDOptimizer do), and starting from zero in every
  round would train with less momentum the shorter the rounds are. Averaging both is what Yu, Jin
  and Yang analyse (On the Linear Speedup Analysis of Communication Efficient Momentum SGD, ICML
  2019).
- A task's weights count as many times as it saw samples in the round. For equal shares that is the
  plain mean; with it, rounds of one step are the very training that one process does.
"""

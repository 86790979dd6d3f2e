"""Pipeline parallelism: split points of a model, and the schedule of each stage.

GPipe (Huang et al., NeurIPS 2019, arXiv:1811.06965) and the one-forward-one-backward schedule
(Narayanan et al.: PipeDream, SOSP 2019; without stale weights, as in its flushed form, Narayanan et
al.: Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, arXiv:2104.04473).
"""

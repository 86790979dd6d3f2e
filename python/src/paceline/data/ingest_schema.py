"""The Petastorm schema of a data set, and a row of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from petastorm.codecs import CompressedImageCodec, ScalarCodec
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql.types import IntegerType, LongType, StringType

# Any Petastorm reader gets decoded pictures through the codec. Ingest stores encoded bytes itself:
# encoding through the codec would compress each photo a second time.
SCHEMA: Any = Unischema(
    "PacelinePhotos",
    [
        UnischemaField("sample_id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("label", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("image", np.uint8, (None, None, 3), CompressedImageCodec("jpeg", 95), False),
        UnischemaField("sha256", np.str_, (), ScalarCodec(StringType()), False),
        UnischemaField("source", np.str_, (), ScalarCodec(StringType()), False),
    ],
)

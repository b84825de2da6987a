"""Data sets by name, from files or from Python, split over clients; each is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.core.rows import RowSource as RowSource
    from splitfed.data.alignment.align import Alignment as Alignment, align as align
    from splitfed.data.alignment.keyed_hash import keyed_hash as keyed_hash, new_secret as new_secret
    from splitfed.data.alignment.keys import in_clear as in_clear
    from splitfed.data.alignment.private_intersection import private_intersection as private_intersection
    from splitfed.data.alignment.table import Table as Table
    from splitfed.data.batch_order import batches as batches
    from splitfed.data.dataset import (
        ClientData as ClientData,
        Dataset as Dataset,
        Federation as Federation,
        LabelSet as LabelSet,
    )
    from splitfed.data.features import Feature as Feature, feed as feed
    from splitfed.data.from_python import from_arrays as from_arrays, from_torch as from_torch
    from splitfed.data.item_rows import PadSequences as PadSequences
    from splitfed.data.sequences import from_sequences as from_sequences
    from splitfed.data.sources.beats import beats as beats, mean_beats as mean_beats
    from splitfed.data.sources.breast_cancer import breast_cancer as breast_cancer
    from splitfed.data.sources.cifar import cifar as cifar
    from splitfed.data.sources.csv import csv as csv
    from splitfed.data.sources.digits import digits as digits
    from splitfed.data.sources.domain_folder import domain_folder as domain_folder
    from splitfed.data.sources.idx import idx as idx
    from splitfed.data.sources.image_folder import image_folder as image_folder
    from splitfed.data.sources.leaf import leaf as leaf
    from splitfed.data.sources.markov_tokens import MarkovChains as MarkovChains, markov_tokens as markov_tokens
    from splitfed.data.sources.mnist5k import mnist5k as mnist5k
    from splitfed.data.sources.npy import npy as npy
    from splitfed.data.sources.npz import npz as npz
    from splitfed.data.sources.parquet import parquet as parquet
    from splitfed.data.sources.rotated_mnist import rotated_mnist as rotated_mnist
    from splitfed.data.sources.synthetic import synthetic as synthetic

make_lazy(__name__)

"""Cluster: the number of chips, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superstep.hardware.chip import Chip

Topology = Literal["switched", "torus", "mesh", "cube"]
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRate:
    """A collective's measured rate: ``latency_s``, plus a second for each ``bytes_per_s``.

    The bytes are those of the whole tensor on one rank: of the input of an all-reduce, a reduce-scatter, an all-to-all
    and a send, of the output of an all-gather.
    """

    name: Collective
    ranks: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Chips in fast domains (a node's NVLink, a rack's NVL72, a pod's ICI), and the network between domains.

    Attributes:
        chip: the chip; all chips are of one kind.
        chips: the number of chips.
        domain: the number of chips that the fast links connect.
        link_bytes_per_s: the rate of one chip over the fast links, one direction.
        link_latency_s: the latency of one message over the fast links.
        network_bytes_per_s: the rate of one chip between domains, one direction.
        network_latency_s: the latency of one message between domains.
        oversubscription: the sum of the rates of all ports over the rate of the network between far domains; 1 if the
            network is not blocking.
        topology: the topology of a domain. switched: all chips at a switch; torus: the fast links connect neighbours;
            mesh: each chip has a link to every other chip; cube: two links along each edge of a cube.
        price_per_chip_hour: the price of a chip for an hour; None if no price is given.
        collectives: measured rates of collectives; empty if only the rates of the links are known.
        disk_read_bytes_per_s, disk_write_bytes_per_s: the measured rate of one host; None if it was not measured.
    """

    chip: Chip
    chips: int
    domain: int
    link_bytes_per_s: float
    link_latency_s: float = 2e-6
    network_bytes_per_s: float
    network_latency_s: float = 6e-6
    oversubscription: float = 1.0
    topology: Topology = "switched"
    price_per_chip_hour: float | None = None
    collectives: tuple[CollectiveRate, ...] = ()
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None

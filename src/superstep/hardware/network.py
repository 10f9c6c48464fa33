"""The usual network between a chip's fast domains: that of its maker's own system, if there is one.

A card without such a system has one port of its time for every two cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.hardware import nvidia, other_vendors
from superstep.hardware.chip import Chip
from superstep.hardware.cluster import Cluster, Topology
from superstep.hardware.units import GBIT_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between domains.

    Attributes:
        bytes_per_s: of one chip, one direction.
        topology: of the domain itself.
        source: the system, and its ports.
    """

    bytes_per_s: float
    topology: Topology = "switched"
    source: str


def _ports(gbit_per_s: float, source: str, chips: int = 1, topology: Topology = "switched") -> Network:
    """One port for ``chips`` chips."""
    return Network(bytes_per_s=gbit_per_s * GBIT_PER_S / chips, topology=topology, source=source)


def _pod(gbit_per_s: float, chips: int, source: str) -> Network:
    """One host's network for its chips."""
    return Network(bytes_per_s=gbit_per_s * GBIT_PER_S / chips, topology="torus", source=source)


_DGX1 = _ports(100, "DGX-1: 4 x 100 Gb/s for 8 chips, hybrid cube mesh", chips=2, topology="cube")
_DGX_A100 = _ports(200, "DGX A100: 8 x 200 Gb/s")
_DGX_H100 = _ports(400, "DGX H100: 8 x 400 Gb/s")
_V100_CARD = _ports(100, "assumed: 100 Gb/s for two cards", chips=2)
_A100_CARD = _ports(200, "assumed: 200 Gb/s for two cards", chips=2)
_H100_CARD = _ports(400, "assumed: 400 Gb/s for two cards", chips=2)
_MI300X = _ports(400, "usual node: 8 x 400 Gb/s, a link from each chip to each other", topology="mesh")
_HOST_OF_8 = _pod(200, 8, "scaling-book: 25 GB/s a host of 8 chips")
_HOST_OF_4 = _pod(200, 4, "scaling-book: 25 GB/s a host of 4 chips")

_USUAL: tuple[tuple[Chip, Network], ...] = (
    (nvidia.P100_SXM, _DGX1),
    (nvidia.P100_PCIE, _V100_CARD),
    (nvidia.V100_16GB, _DGX1),
    (nvidia.V100_32GB, _DGX1),
    (nvidia.V100_32GB_SXM3, _ports(100, "DGX-2: 8 x 100 Gb/s for 16 chips", chips=2)),
    (nvidia.V100_16GB_PCIE, _V100_CARD),
    (nvidia.V100_32GB_PCIE, _V100_CARD),
    (nvidia.V100S_PCIE, _V100_CARD),
    (nvidia.A100_40GB, _DGX_A100),
    (nvidia.A100_80GB, _DGX_A100),
    (nvidia.A100_40GB_PCIE, _A100_CARD),
    (nvidia.A100_80GB_PCIE, _A100_CARD),
    (nvidia.A800, _DGX_A100),
    (nvidia.L40S, _A100_CARD),
    (nvidia.H100_SXM, _DGX_H100),
    (nvidia.H100_96GB, _DGX_H100),
    (nvidia.H100_PCIE, _H100_CARD),
    (nvidia.H100_NVL, _H100_CARD),
    (nvidia.H800, _DGX_H100),
    (nvidia.H200, _ports(400, "DGX H200: 8 x 400 Gb/s")),
    (nvidia.H200_NVL, _H100_CARD),
    (nvidia.GH200, _ports(200, "Alps: 4 x 200 Gb/s")),
    (nvidia.B200, _ports(400, "DGX B200: 8 x 400 Gb/s")),
    (nvidia.GB200, _ports(400, "GB200 NVL72: 4 x 400 Gb/s a tray")),
    (nvidia.B300, _ports(800, "HGX B300: 8 x 800 Gb/s")),
    (nvidia.GB300, _ports(800, "GB300 NVL72: 4 x 800 Gb/s a tray")),
    (other_vendors.MI250X, _ports(200, "Frontier: 4 x 200 Gb/s")),
    (other_vendors.MI300X, _MI300X),
    (other_vendors.MI325X, _MI300X),
    (other_vendors.MI355X, _MI300X),
    (other_vendors.TPU_V3, _HOST_OF_8),
    (other_vendors.TPU_V4, _HOST_OF_4),
    (other_vendors.TPU_V5E, _pod(200, 8, "Cloud TPU documentation: 2 x 100 Gb/s a host of 8 chips")),
    (other_vendors.TPU_V5P, _HOST_OF_4),
    (other_vendors.TPU_V6E, _pod(800, 8, "Cloud TPU documentation: 4 x 200 Gb/s a host of 8 chips")),
    (other_vendors.TPU_V7X, _pod(400, 4, "Cloud TPU documentation: 100 Gb/s a chip")),
    (other_vendors.GAUDI3, Network(bytes_per_s=3 * 200 * GBIT_PER_S, source="3 of its 24 ports of 200 Gb/s")),
    (other_vendors.TRAINIUM2, _ports(200, "Trn2: 16 x 200 Gb/s")),
)
NETWORKS: dict[str, Network] = {chip.name: network for chip, network in _USUAL}


def usual_cluster(chip: Chip, chips: int, *, like: str | None = None) -> Cluster:
    """Chips in the usual system of the catalogue's chip ``like``, by default the chip itself."""
    network = NETWORKS[like or chip.name]
    return Cluster(
        chip=chip,
        chips=chips,
        domain=chip.domain,
        link_bytes_per_s=chip.link_bytes_per_s,
        network_bytes_per_s=network.bytes_per_s,
        topology=network.topology,
    )

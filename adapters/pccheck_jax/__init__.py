"""JAX leaves and pytree nodes for pccheck (imports jax and pccheck's public names)."""

from pccheck_jax.coordinator import JaxCoordinator
from pccheck_jax.kind import JaxKind
from pccheck_jax.trees import PytreeKind

__all__ = ["JaxCoordinator", "JaxKind", "PytreeKind", "containers", "kind"]

kind = JaxKind()
containers = PytreeKind()

"""One error tree. Every error has a stable code, a process exit code and says how to mend it.

A module per chapter; each class carries all that `docs/errors.md` says of it, and
`geo_ray.errors.page` writes that page.
"""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError as GeoRayError
from geo_ray.errors.base import from_code as from_code
from geo_ray.errors.bugs import InvariantError as InvariantError
from geo_ray.errors.checkpoint import CheckpointConflictError as CheckpointConflictError
from geo_ray.errors.checkpoint import CheckpointCorruptError as CheckpointCorruptError
from geo_ray.errors.checkpoint import CheckpointError as CheckpointError
from geo_ray.errors.checkpoint import CheckpointMissingError as CheckpointMissingError
from geo_ray.errors.checkpoint import ConfigDriftError as ConfigDriftError
from geo_ray.errors.clouds import CloudError as CloudError
from geo_ray.errors.clouds import CloudUnreachableError as CloudUnreachableError
from geo_ray.errors.clouds import ProviderRefusedError as ProviderRefusedError
from geo_ray.errors.clouds import ProviderUnreachableError as ProviderUnreachableError
from geo_ray.errors.clouds import TerraformOutputsError as TerraformOutputsError
from geo_ray.errors.cluster import ClusterBusyError as ClusterBusyError
from geo_ray.errors.cluster import ClusterError as ClusterError
from geo_ray.errors.cluster import ClusterStartError as ClusterStartError
from geo_ray.errors.cluster import ClusterStateError as ClusterStateError
from geo_ray.errors.cluster import MachinesLeftError as MachinesLeftError
from geo_ray.errors.cluster import PlacementError as PlacementError
from geo_ray.errors.cluster import PortInUseError as PortInUseError
from geo_ray.errors.cluster import PreflightError as PreflightError
from geo_ray.errors.cluster import RayUnreachableError as RayUnreachableError
from geo_ray.errors.configuration import ConfigError as ConfigError
from geo_ray.errors.data import DataError as DataError
from geo_ray.errors.data import ManifestError as ManifestError
from geo_ray.errors.data import RegionsOmittedError as RegionsOmittedError
from geo_ray.errors.data import ResidencyDeniedError as ResidencyDeniedError
from geo_ray.errors.data import SchemaMismatchError as SchemaMismatchError
from geo_ray.errors.data import ShardCorruptError as ShardCorruptError
from geo_ray.errors.data import ShardEmptyError as ShardEmptyError
from geo_ray.errors.data import ShardMissingError as ShardMissingError
from geo_ray.errors.data import StoreError as StoreError
from geo_ray.errors.lab import LabDownError as LabDownError
from geo_ray.errors.lab import LabError as LabError
from geo_ray.errors.lab import LabLateError as LabLateError
from geo_ray.errors.lab import LabUnavailableError as LabUnavailableError
from geo_ray.errors.lab import LabUnknownError as LabUnknownError
from geo_ray.errors.network import CertificateError as CertificateError
from geo_ray.errors.network import DeadlineExceededError as DeadlineExceededError
from geo_ray.errors.network import FrameError as FrameError
from geo_ray.errors.network import LinkDownError as LinkDownError
from geo_ray.errors.network import LinkUnknownError as LinkUnknownError
from geo_ray.errors.network import PeerRefusedError as PeerRefusedError
from geo_ray.errors.network import ReferenceLostError as ReferenceLostError
from geo_ray.errors.network import TransportError as TransportError
from geo_ray.errors.planning import CurrencyError as CurrencyError
from geo_ray.errors.planning import ExtrapolationError as ExtrapolationError
from geo_ray.errors.planning import OtherModelError as OtherModelError
from geo_ray.errors.planning import PlanError as PlanError
from geo_ray.errors.planning import PlanInfeasibleError as PlanInfeasibleError
from geo_ray.errors.planning import PriceBookError as PriceBookError
from geo_ray.errors.planning import PriceUnknownError as PriceUnknownError
from geo_ray.errors.planning import ProfileError as ProfileError
from geo_ray.errors.run import AveragerFailedError as AveragerFailedError
from geo_ray.errors.run import DriverLostError as DriverLostError
from geo_ray.errors.run import DriverMissingError as DriverMissingError
from geo_ray.errors.run import HeadLostError as HeadLostError
from geo_ray.errors.run import InterruptedRunError as InterruptedRunError
from geo_ray.errors.run import LeaseLostError as LeaseLostError
from geo_ray.errors.run import MembersRefusedError as MembersRefusedError
from geo_ray.errors.run import RegionLostError as RegionLostError
from geo_ray.errors.run import RunDirectoryError as RunDirectoryError
from geo_ray.errors.run import RunError as RunError
from geo_ray.errors.run import RunFinishedError as RunFinishedError
from geo_ray.errors.run import RunHeldError as RunHeldError
from geo_ray.errors.run import StalledError as StalledError
from geo_ray.errors.run import WorkerLostError as WorkerLostError
from geo_ray.errors.scheduling import ScheduleInputError as ScheduleInputError
from geo_ray.errors.scheduling import SchedulingError as SchedulingError
from geo_ray.errors.scheduling import TraceError as TraceError
from geo_ray.errors.task import NonFiniteError as NonFiniteError
from geo_ray.errors.task import OwnCodeError as OwnCodeError
from geo_ray.errors.task import TaskError as TaskError
from geo_ray.errors.task import TaskLoadError as TaskLoadError
from geo_ray.errors.task import TaskOutputError as TaskOutputError
from geo_ray.errors.task import TaskStateError as TaskStateError
from geo_ray.errors.tuning import SearchMissingError as SearchMissingError
from geo_ray.errors.tuning import TrialsFailedError as TrialsFailedError
from geo_ray.errors.tuning import TuningDirectoryError as TuningDirectoryError
from geo_ray.errors.tuning import TuningError as TuningError

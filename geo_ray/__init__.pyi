from geo_ray.api.clusters import down as down
from geo_ray.api.clusters import up as up
from geo_ray.api.compare import compare as compare
from geo_ray.api.config import load_config as load_config
from geo_ray.api.data import shard_data as shard_data
from geo_ray.api.live import watch as watch
from geo_ray.api.plan import plan as plan
from geo_ray.api.plan import profile as profile
from geo_ray.api.run import Run as Run
from geo_ray.api.run import open_run as open_run
from geo_ray.api.status import checkpoints as checkpoints
from geo_ray.api.status import members as members
from geo_ray.api.status import report as report
from geo_ray.api.status import status as status
from geo_ray.api.status import stop as stop
from geo_ray.api.train import serve as serve
from geo_ray.api.train import simulate as simulate
from geo_ray.api.train import train as train
from geo_ray.api.tune import tune as tune
from geo_ray.base.errors import GeoRayError as GeoRayError
from geo_ray.base.model import StrictModel
from geo_ray.base.version import __version__ as __version__
from geo_ray.codecs.base import Codec as Codec
from geo_ray.data.columns import Ragged as Ragged
from geo_ray.data.tasks.base import Dataset as Dataset
from geo_ray.data.tasks.base import Task as Task
from geo_ray.experiment.experiment import Experiment as Experiment
from geo_ray.joining.site import join as join
from geo_ray.runtime.group_task import GroupRank as GroupRank
from geo_ray.strategies.base import Strategy as Strategy
from geo_ray.telemetry.events import Event as Event

Options = StrictModel

__all__: list[str]

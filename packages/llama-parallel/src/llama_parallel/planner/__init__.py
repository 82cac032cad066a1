"""Which layout to train a model with: memory, communication and time of every one, before anything is launched."""

from .comm_volume import Volume as Volume
from .comm_volume import volumes as volumes
from .cost import Cost as Cost
from .cost import predict_cost as predict_cost
from .hardware import H100 as H100
from .hardware import H200 as H200
from .hardware import Hardware as Hardware
from .memory import Memory as Memory
from .memory import predict_memory as predict_memory
from .report import describe_plan as describe_plan
from .search import Candidate as Candidate
from .search import Plan as Plan
from .search import plan as plan
from .work import PRECISIONS as PRECISIONS
from .work import Work as Work

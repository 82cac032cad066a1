"""Low-rank adapters: reading, applying, training, merging and saving them. See `lora_layers.py` and `lora_files.py`."""

from .lora_files import load_adapter as load_adapter
from .lora_files import save_adapter as save_adapter
from .lora_layers import Adapter as Adapter
from .lora_layers import LoraConfig as LoraConfig
from .lora_layers import LoraLinear as LoraLinear
from .lora_layers import adapter_of as adapter_of
from .lora_layers import apply_lora as apply_lora
from .lora_layers import check_adapter as check_adapter
from .lora_layers import draw_adapter as draw_adapter
from .lora_layers import merge_lora as merge_lora

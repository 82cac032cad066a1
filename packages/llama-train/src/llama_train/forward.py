"""Hidden states of a batch in one process, with attention kept inside documents where the batch names them."""

from __future__ import annotations

from torch import Tensor

from llama_core import Attend, Llama, PackedAttend, causal_attend, plain_attend, positions_from_documents

from .batches import Batch


def forward(model: Llama, batch: Batch) -> Tensor:
    """(B, S, E) for a batch on the model's device.

    With documents, positions begin anew in each; attention is that of llama_kernels where the model's is, and torch's
    scaled_dot_product_attention under a mask elsewhere.
    """
    if batch.documents is None:
        hidden: Tensor = model(batch.tokens)
        return hidden
    attend: Attend
    if model.attend in (causal_attend, plain_attend):
        attend = PackedAttend(batch.documents)
    else:
        from llama_parallel.documents import DocumentAttend  # here: it needs llama_kernels, which most CPU runs do not

        attend = DocumentAttend(batch.documents)
    packed: Tensor = model(batch.tokens, positions_from_documents(batch.documents), attend)
    return packed

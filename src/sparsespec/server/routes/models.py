"""/v1/models."""

from __future__ import annotations

from fastapi import APIRouter

from sparsespec.server.protocol.misc import Model, ModelList
from sparsespec.server.service import Served, Service, error_docs

router = APIRouter(prefix="/v1/models")


def _model(service: Service, name: str) -> Model:
    return Model(id=name, object="model", created=service.created, owned_by="sparsespec", root=service.engine.loaded.name,
                 parent=None, max_model_len=service.engine.max_model_len)


@router.get("", responses=error_docs(401))
async def list_models(service: Served) -> ModelList:
    """The names that the model is served under."""
    return ModelList(object="list", data=[_model(service, name) for name in service.names])


@router.get("/{name:path}", responses=error_docs(401, 404))
async def retrieve_model(name: str, service: Served) -> Model:
    """One of the names."""
    service.check_model(name)
    return _model(service, name)

"""ReadableRequests: a message that is not of its call's type is the caller's mistake, not the server's."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError


class ReadableRequests(grpc.aio.ServerInterceptor):
    """Ends a call whose message cannot be read with INVALID_ARGUMENT. grpc itself ends it with UNKNOWN and the name of
    a Python class, and writes a traceback to the log."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The call's handler: with this check if it is a coroutine that takes one message, else unchanged."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        answer, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        if handler.response_streaming:
            answer, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        if not inspect.iscoroutinefunction(answer):
            return handler

        def read(message: bytes) -> Any:
            try:
                return handler.request_deserializer(message)
            except DecodeError:
                return None

        async def answer_readable(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if request is None:
                what = f"the message is not of the type that {handler_call_details.method} takes"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
            return await answer(request, context)

        return make(answer_readable, read, handler.response_serializer)

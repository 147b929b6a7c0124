"""Every error a caller may see.

    GemserveError
    ├── ConfigError          the operator's configuration is wrong
    ├── ModelError           a model cannot be loaded or served correctly
    ├── AdapterError         an adapter cannot be loaded, or is not for this model (400)
    ├── AdapterBusy          there is no room for an adapter now (503)
    ├── AdapterUnavailable   what a name stood for can no longer be loaded (503)
    ├── RequestError         the client's request is wrong (400)
    │   ├── ContextExceeded
    │   │   ├── PromptTooLong
    │   │   ├── AnswerTooLong
    │   │   └── KeptTooLong
    │   ├── CapacityExceeded
    │   ├── ModelNotFound    (404)
    │   ├── AdapterNotFound  (404)
    │   ├── DocumentNotFound (404)
    │   ├── LibraryNotFound  (404)
    │   └── LibraryFileNotFound (404)
    ├── LibraryError         a library cannot be opened, read or written; the message says which
    │   ├── LibraryBusy      another process writes into it (409)
    │   └── OtherModel       it was read by another model (409)
    ├── InvalidKey           (401)
    ├── PermissionDenied     (403)
    │   └── HostNotAllowed
    ├── QuotaExceeded        (429)
    ├── QueueFull            (503)
    ├── SchemasBusy          too many schemas are being tried (503)
    ├── PdfsBusy             too many PDFs and other files are being read (503)
    ├── NotCalibrated        the model is calibrated while there are no requests (503)
    ├── EngineDead           (503)
    └── RankFailed           a process that has a part of the model is gone

Messages name the field, the value and the limit. `param` is the request field at fault.
"""

from __future__ import annotations

from collections.abc import Collection

_SHOWN_CHARS = 100


def shown(value: object) -> str:
    """`value` as an error message shows it, never longer than a line."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_CHARS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[:_SHOWN_CHARS]) if isinstance(value, (str, bytes)) else repr(value)
    is_cut = len(text) > _SHOWN_CHARS or (isinstance(value, str) and len(value) > _SHOWN_CHARS)
    return f"{text[:_SHOWN_CHARS]}…" if is_cut else text


class GemserveError(Exception):
    """Base of all errors that are raised on purpose."""


class ConfigError(GemserveError):
    """Settings are invalid. `problems` says of each one what is wrong."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ModelError(GemserveError):
    """A model cannot be loaded, or cannot be served correctly; the message says why."""


class AdapterError(GemserveError):
    """An adapter cannot be loaded, or is not for this model; the message says why."""


class AdapterBusy(GemserveError):
    code = "adapter_memory_full"
    retry_after_s = 1

    def __init__(self, *, name: str, needed: int, held: int, limit: int) -> None:
        super().__init__(
            f"Adapter {shown(name)} needs {needed} bytes; running requests hold {held} of the "
            f"{limit} that adapters may take."
        )


class AdapterUnavailable(GemserveError):
    """A request names an adapter whose folder has changed, so it cannot be loaded again."""

    code = "adapter_unavailable"

    def __init__(self, cause: AdapterError, *, param: str) -> None:
        super().__init__(f"{cause} (its folder has changed since it was loaded)")
        self.param = param


class RequestError(GemserveError):
    """A request is invalid; `param` names the field."""

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


ONE_LEFT = "One token has to be left for the answer."


class ContextExceeded(RequestError):
    """A request needs more tokens than the model's context has.

    The message begins with OpenAI's words, by which agents know that they must shorten a
    conversation, and ends with `detail`. `context`: the most tokens of prompt and answer together.
    `place`: the field that has the prompt. `answer`: how many tokens the request wants besides.
    """

    def __init__(
        self,
        *,
        context: int,
        prompt: int,
        param: str,
        place: str,
        answer: int | None = None,
        note: str = "",
        detail: str = "",
        is_least: bool = False,
    ) -> None:
        super().__init__(detail, param=param, code="context_length_exceeded")
        self.place = place
        self.detail = detail
        self._limit = f"This model's maximum context length is {context} tokens{note}."
        self._prompt = prompt
        self._answer = answer
        self._is_least = is_least

    def __str__(self) -> str:
        place = self.place.split(".")[0]
        words = [_RESPONSES_WORDS if place == "input" else "", self._limit, self._counted(place)]
        return " ".join(filter(None, [*words, self.detail]))

    def _counted(self, place: str) -> str:
        prompt, answer = self._prompt, self._answer
        if answer is None:
            count = f"at least {prompt}" if self._is_least else prompt
            return (
                f"However, your prompt contains {count} input tokens. Please reduce the length of "
                f"the {place}."
            )
        requested = f"However, you requested {prompt + answer} tokens"
        if place == "prompt":
            return (
                f"{requested} ({prompt} in your prompt; {answer} for the completion). Please "
                "reduce your prompt; or completion length."
            )
        return (
            f"{requested} ({prompt} in the {place}, {answer} in the completion). Please reduce the "
            f"length of the {place} or completion."
        )


_RESPONSES_WORDS = (
    "Your input exceeds the context window of this model. Please adjust your input and try again."
)


class PromptTooLong(ContextExceeded):
    """`limit`: the most tokens of a prompt. `is_least`: `tokens` is the least that the prompt can
    have, because it was not tokenized. `leaves_one`: the context has one more, for the answer."""

    def __init__(
        self,
        *,
        tokens: int,
        limit: int,
        param: str,
        note: str = "",
        is_least: bool = False,
        leaves_one: bool = False,
    ) -> None:
        super().__init__(
            context=limit + leaves_one,
            prompt=tokens,
            param=param,
            place=param,
            note=note,
            detail=ONE_LEFT if leaves_one else "",
            is_least=is_least,
        )


class AnswerTooLong(ContextExceeded):
    """Of `tokens` tokens of a prompt `read` are read, and `max_tokens` do not fit behind them.

    `param` is the field that has `max_tokens`.
    """

    def __init__(
        self,
        *,
        tokens: int,
        read: int,
        max_tokens: int,
        context: int,
        param: str,
        place: str,
        note: str = "",
    ) -> None:
        super().__init__(
            context=context,
            prompt=read,
            answer=max_tokens,
            param=param,
            place=place,
            note=note,
            detail=(
                f"{param}={max_tokens}: the context of {context} tokens{note} leaves room for "
                f"{context - read} after the {read} of {tokens} prompt tokens that are kept"
            ),
        )


class KeptTooLong(ContextExceeded):
    """What a filter would keep does not fit into the context: `kept` of `tokens`.

    `protected`: how many tokens of the prompt are always read, if the method protects any.
    """

    def __init__(
        self, *, tokens: int, kept: int, protected: int, limit: int, param: str, note: str = ""
    ) -> None:
        of_them = (
            f" {protected} of them are instructions, tools, calls, the question and the template, "
            "which are always read; lower filter.keep, or shorten them"
        )
        super().__init__(
            context=limit + 1,
            prompt=kept,
            param=param,
            place=param,
            note=note,
            detail=(
                f"{param}: the filter would keep {kept} of {tokens} tokens, and the context has "
                f"room for {limit}{note};{of_them if protected else ' lower filter.keep'}. "
                f"{ONE_LEFT}"
            ),
        )


class CapacityExceeded(RequestError):
    """A request that would not fit into the KV memory even alone.

    `param`: the field that has the prompt. `answer`: the one that has `max_tokens`; None: the
    request generates nothing. `counts`: the beginning of the message, with the arithmetic.
    """

    def __init__(
        self,
        *,
        tokens: int,
        kept: int,
        max_tokens: int,
        needed_bytes: int,
        limit_bytes: int,
        param: str = "prompt",
        answer: str | None = "max_tokens",
    ) -> None:
        self._counted = {
            **{"tokens": tokens, "kept": kept, "max_tokens": max_tokens},
            **{"needed_bytes": needed_bytes, "limit_bytes": limit_bytes},
        }
        with_answer = "" if answer is None else f" with {answer}={max_tokens}"
        lower = "" if answer is None else f", lower {answer}"
        self.counts = (
            f"{param}: a prompt of {tokens} tokens, {kept} of them kept,{with_answer} needs "
            f"{needed_bytes} bytes of KV memory at its peak; this server has {limit_bytes}"
        )
        super().__init__(
            f"{self.counts} (--kv-memory). Shorten {param}{lower}, or have less of it kept "
            "(filter.keep); whoever runs the server can give it more memory.",
            param=param,
            code="kv_memory_exceeded",
        )

    def naming(self, param: str, answer: str | None) -> CapacityExceeded:
        """The same error of a request that has these fields."""
        return CapacityExceeded(**self._counted, param=param, answer=answer)


class ModelNotFound(RequestError):
    def __init__(self, *, model: str, served: str) -> None:
        super().__init__(
            f"The model {shown(model)} does not exist; this server serves {shown(served)}.",
            param="model",
            code="model_not_found",
        )


class AdapterNotFound(RequestError):
    def __init__(self, name: str, loaded: Collection[str]) -> None:
        super().__init__(
            f"The adapter {shown(name)} does not exist; loaded are: "
            f"{shown(', '.join(sorted(loaded))) if loaded else 'none'}.",
            param="adapter",
            code="adapter_not_found",
        )


class DocumentNotFound(RequestError):
    """Whoever asks has no such document, whether or not another key has it."""

    def __init__(self, document_id: str, *, param: str) -> None:
        super().__init__(
            f"{param}={shown(document_id)}: no such document: it has expired or was deleted, or "
            "this key never had it.",
            param=param,
            code="document_not_found",
        )


class NoLibraries(RequestError):
    def __init__(self) -> None:
        super().__init__(
            "libraries: this server has none; start it with --library-dir",
            param=None,
            code="no_libraries",
        )


class LibraryNotFound(RequestError):
    def __init__(self, name: str, *, param: str) -> None:
        super().__init__(
            f"The library {shown(name)} does not exist.", param=param, code="library_not_found"
        )


class LibraryFileNotFound(RequestError):
    def __init__(self, path: str, *, param: str) -> None:
        super().__init__(
            f"The library has no file {shown(path)}.", param=param, code="library_file_not_found"
        )


class LibraryError(GemserveError):
    """A library cannot be opened, read or written. `code` is that of the HTTP reply."""

    code = "library_error"
    retry_after_s: int | None = None


class LibraryBusy(LibraryError):
    code = "library_busy"
    retry_after_s = 1

    def __init__(self, path: object) -> None:
        super().__init__(
            f"library {path}: another process is adding or removing files; one at a time can"
        )


class OtherModel(LibraryError):
    """A library's keys were computed by another model, so that this one finds nothing by them."""

    code = "library_of_other_model"

    def __init__(self, path: object, *, theirs: str, own: str) -> None:
        super().__init__(
            f"library {path}: was read by {theirs}, and this is {own}; ask with that "
            "model, or read the files anew: gemserve library add NAME PATH… --anew"
        )


class InvalidKey(GemserveError):
    """A request without a valid API key. The message never repeats the key that was sent."""

    code = "invalid_api_key"


class PermissionDenied(GemserveError):
    """A request whose key, or lack of one, does not permit it."""

    code = "permission_denied"


class HostNotAllowed(PermissionDenied):
    """A request that was sent to a name which is not the server's."""

    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"Host={shown(host)}: this server answers to localhost, 127.0.0.0/8, [::1] and the "
            "names given with --allowed-host; whoever runs it can give this one, too."
        )


class QuotaExceeded(GemserveError):
    """A request beyond the limits of its API key."""

    def __init__(self, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class QueueFull(GemserveError):
    code = "queue_full"
    retry_after_s = 1

    def __init__(
        self, *, waiting: int, limit: int, of_key: int | None = None, kind: str = "requests"
    ) -> None:
        """`kind`: what is counted.

        `of_key`: requests of this key that wait, if the free places are for other keys.
        """
        text = f"The queue is full: {waiting} {kind} wait, the limit is {limit}."
        if of_key is not None:
            text = (
                f"{of_key} requests of this API key wait, of {waiting} in all. The queue has "
                f"{limit} places, and those that are free are kept for other keys."
            )
        super().__init__(text)


class WaitTooLong(QueueFull):
    """A request that would wait longer for its first token than the server lets any wait."""

    def __init__(self, *, wait_s: float, limit_s: float) -> None:
        GemserveError.__init__(
            self,
            f"The requests before this one will take about {wait_s:.1f} s; this server lets none "
            f"wait for more than {limit_s:g} s (--max-wait).",
        )
        self.wait_s = wait_s


class WaitedTooLong(QueueFull):
    """A request whose text was not looked at in time, because others' texts came first."""

    def __init__(self, *, waited_s: float, limit_s: float, name: str) -> None:
        GemserveError.__init__(
            self,
            f"Nobody has looked at it for {waited_s:.1f} s, because other requests came first; the "
            f"limit is {limit_s:g} s ({name}).",
        )


class LogprobsFull(QueueFull):
    """The requests in progress may hold so many log-probabilities that there is no more room."""

    code = "logprobs_memory_full"

    def __init__(self, needed: int, *, used: int, limit: int) -> None:
        GemserveError.__init__(
            self,
            f"logprobs: as many as this request asks for take {needed} bytes of memory; those of "
            f"the requests in progress take {used} of {limit}.",
        )


class ReplyMemoryFull(QueueFull):
    """The replies that are being written or sent leave too little room for a further one."""

    code = "reply_memory_full"

    def __init__(self, needed: int, *, used: int, limit: int) -> None:
        GemserveError.__init__(
            self,
            f"The reply may take {needed} bytes of memory; those that are being written or sent "
            f"take {used} of {limit}.",
        )


class SchemasBusy(GemserveError):
    """Schemas that are new to the server are tried a few at a time, and too many wait for that."""

    code = "schema_trials_busy"
    retry_after_s = 5

    def __init__(self, cause: str) -> None:
        super().__init__(f"A schema could not be tried: {cause}. Try again later.")


class PdfsBusy(GemserveError):
    """Files that are no plain text are read a few at a time, and too many wait for that."""

    code = "pdf_reading_busy"
    retry_after_s = 10

    def __init__(self, cause: str) -> None:
        super().__init__(f"A file could not be read: {cause}. Try again later.")


class NotCalibrated(GemserveError):
    """A request that no prompt is read whole for: its heads are not known yet."""

    code = "not_calibrated"
    retry_after_s = 30

    def __init__(self) -> None:
        super().__init__(
            "The model is not calibrated, so documents cannot be ranked. With --calibrate later the"
            " server does that while it has no requests, and its log says if it fails."
        )


class ReplicaUnavailable(GemserveError):
    """No replica can answer now. `code` says why; it may be tried again."""

    retry_after_s = 5

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineDead(GemserveError):
    def __init__(self, cause: str) -> None:
        super().__init__(f"The engine has stopped: {cause}")


class RankFailed(GemserveError):
    """A rank has ended, does not answer, or has not done what rank 0 has done."""

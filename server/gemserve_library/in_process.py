"""Libraries of a model in this process: for scripts and notebooks, without a server.

from gemserve.llm import LLM
from gemserve_library.in_process import LibrariesOf

llm = LLM("smollm2")
libraries = LibrariesOf(llm)
manuals = libraries.open("manuals", is_new=True)
for done in libraries.add_files(manuals, ["docs"]):
    print(done.files, done.read_tokens)
answer = llm.generate(libraries.prompt("Who wrote the letter?", [manuals]))
print(answer.text, answer.filter.sources)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from gemserve.contract.filter_options import CANDIDATES, NO_PROTECT, FilterOptions, Protect
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import RequestError
from gemserve.llm import LLM
from gemserve.prompting.answerable import Answerable
from gemserve.prompting.prompt import Prompt, chat_prompt, text_prompt
from gemserve.prompting.tools import Message
from gemserve_library.adding import Added, FileSource, add_files
from gemserve_library.asking import find_excerpts
from gemserve_library.finding import find_files
from gemserve_library.library import Library
from gemserve_library.vectors import NO_HEADS, VectorRequests, vector_requests


class LibrariesOf:
    """Opens, fills and searches libraries with one model."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @cached_property
    def vectors(self) -> VectorRequests:
        """What libraries ask the model for. Raises `RequestError` if its heads are unknown."""
        found = vector_requests(self._llm.core, self._llm.name)
        if found is None:
            raise RequestError(f"library: {NO_HEADS}", param="filter.library")
        return found

    def open(self, folder: str | Path, *, is_new: bool = False) -> Library:
        """Open a library of files that this model has read, or make one with `is_new`.

        Raises `LibraryError`, or `OtherModel` if another model has read it.
        """
        identity = self.vectors.identity
        if is_new:
            return Library.create(Path(folder), identity)
        return Library(Path(folder), identity)

    def add_files(self, library: Library, paths: Sequence[str]) -> Iterator[Added]:
        """Add files, folders and patterns to a library; yields what has been done so far.

        Raises `LibraryError`.
        """
        sources = map(FileSource.of_file, find_files(paths))
        llm = self._llm
        return add_files(library, self.vectors, llm.tokenizer, llm.run_to_end, sources)

    def prompt(
        self,
        prompt: str | Sequence[Message],
        libraries: Sequence[Library],
        *,
        candidates: int = CANDIDATES,
        protect: Protect = NO_PROTECT,
    ) -> Prompt:
        """A prompt with what libraries have of its question in front of it.

        `candidates`: segments that are found, and then read. Raises `LibraryError`.
        """
        llm = self._llm
        alone = llm.prompt(prompt, protect)
        request = llm.request(alone, SamplingParams(max_tokens=1), FilterOptions(), None)
        names = [library.folder.name for library in libraries]
        answerable = find_excerpts(
            libraries,
            names,
            request,
            llm.run_to_end(self.vectors.for_question(request)),
            self.vectors,
            llm.tokenizer,
            candidates,
        )
        return replace(self._with(answerable, prompt, protect), searched=answerable.searched)

    def _with(
        self, answerable: Answerable, prompt: str | Sequence[Message], protect: Protect
    ) -> Prompt:
        llm, excerpts = self._llm, answerable.excerpts
        if isinstance(prompt, str):
            if not llm.has_chat_template:
                text = answerable.in_front_of(prompt)
                return text_prompt(llm.tokenizer, text, protect, excerpts=excerpts)
            prompt = [{"role": "user", "content": prompt}]
        short = llm.core.planner.short_message_tokens
        messages = answerable.in_messages(prompt)
        return chat_prompt(llm.tokenizer, messages, protect=protect, short=short, excerpts=excerpts)

"""Random requests made from the OpenAPI document, sent to a server process: no 5xx, nothing undocumented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from tests.api.processes import Served, served

pytestmark = [pytest.mark.api, pytest.mark.slow]

KEY = "the-key-0123456789abcdef"


@pytest.fixture(scope="module", params=["open", "closed"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server without keys, and one with a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    flags = ("--api-key-file", str(keys)) if request.param == "closed" else ()
    with served("--no-access-log", "--upload-timeout-s", "5", *flags) as server:
        yield server


@strategies.composite
def _cases(draw: strategies.DrawFn, made: strategies.SearchStrategy[Any]) -> Any:
    """Reject cases on which schemathesis itself fails: it sometimes cannot validate the bytes it made for a file."""
    try:
        return draw(made)
    except ValueError as error:
        if "Unsupported type: 'Binary'" in str(error):
            hypothesis.reject()
        raise


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_every_operation_does_what_its_document_says(server: Served, kind: str) -> None:
    # Imported here, since it takes a second of every run that only collects this file.
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi import checks

    mode = GenerationMode(kind)
    conform = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    headers = {"authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=headers)
    tried = set()
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()

        @hypothesis.settings(max_examples=50, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=_cases(operation.as_strategy(generation_mode=mode)))
        def call(case: Any) -> None:
            case.call_and_validate(checks=conform)

        try:
            call()
        except hypothesis.errors.Unsatisfiable:  # no request to this operation can be invalid
            assert mode is GenerationMode.NEGATIVE
        tried.add(operation.label)
    assert len(tried) >= 10

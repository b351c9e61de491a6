import pytest
from support.toy import check_blocks, drain, greedy, toy_engine

from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
MODULE = list(range(1, 23))


def test_what_begins_with_a_pinned_prompt_has_it_computed() -> None:
    engine = toy_engine(block_size=4)
    request_id = engine.pin_prompt("system", MODULE)
    output = drain(engine)[request_id]
    assert (output.prompt_token_ids, output.finish_reason, output.embedding) == (MODULE, "stop", None)
    assert engine.pinned_prompt("system").token_ids == MODULE
    for _ in range(2):
        request_id = engine.add_request([*engine.pinned_prompt("system").token_ids, 40, 41], GREEDY)
        output = drain(engine)[request_id]
        assert output.num_cached_tokens == 20
        assert output.outputs[0].token_ids == greedy([*MODULE, 40, 41], 8)
    check_blocks(engine)
    assert engine.stats().num_used_blocks == 6


def test_a_pinned_prompt_is_never_evicted_until_it_is_removed() -> None:
    engine = toy_engine(block_size=4, num_kv_blocks=20, max_model_len=40)
    engine.pin_prompt("system", MODULE)
    drain(engine)

    def fill_the_cache() -> None:
        for index in range(6):
            engine.add_request([index] * 30, GREEDY)
        drain(engine)
        check_blocks(engine)

    def num_cached_tokens() -> int:
        request_id = engine.add_request([*MODULE, 50], GREEDY)
        return drain(engine)[request_id].num_cached_tokens

    fill_the_cache()
    assert num_cached_tokens() == 20
    engine.unpin_prompt("system")
    assert engine.stats().num_used_blocks == 0
    check_blocks(engine)
    assert num_cached_tokens() == 20, "it stays until others need the room"
    fill_the_cache()
    assert num_cached_tokens() == 0


@pytest.mark.parametrize("still_runs", [False, True])
def test_a_pinned_prompt_that_is_computed_together_with_the_same_text(still_runs: bool) -> None:
    """The first one's blocks are found, and may be evicted; then the pinned one's must be."""
    engine = toy_engine(block_size=4, num_kv_blocks=26, max_model_len=40)
    request_id = engine.add_request([*MODULE, 30], SamplingParams(temperature=0.0, max_tokens=2 + 8 * still_runs))
    engine.pin_prompt("system", MODULE)
    for _ in range(3):
        engine.step()
        check_blocks(engine)
    assert engine.has_unfinished is still_runs
    engine.abort(request_id)
    for index in range(6):
        engine.add_request([index] * 30, GREEDY)
    drain(engine)
    check_blocks(engine)
    request_id = engine.add_request([*MODULE, 50], GREEDY)
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 20
    assert output.outputs[0].token_ids == greedy([*MODULE, 50], 8)


@pytest.mark.parametrize("removed", ["first", "second"])
def test_pinned_prompts_that_begin_alike_and_are_computed_together(removed: str) -> None:
    """Prompts that are pinned in one step, as all are after a sleep, share their blocks until both are removed."""
    engine = toy_engine(block_size=4, num_kv_blocks=26, max_model_len=40)
    ends = {"first": [30, 31, 32, 33], "second": [40, 41, 42, 43]}
    for name, end in ends.items():
        engine.pin_prompt(name, [*MODULE[:20], *end])
    drain(engine)
    check_blocks(engine)
    assert engine.stats().num_used_blocks == 7
    engine.unpin_prompt(removed)
    [kept] = ends.keys() - {removed}
    for index in range(6):
        engine.add_request([index] * 30, GREEDY)
    drain(engine)
    check_blocks(engine)
    request_id = engine.add_request([*engine.pinned_prompt(kept).token_ids, 50], GREEDY)
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 24
    assert output.outputs[0].token_ids == greedy([*MODULE[:20], *ends[kept], 50], 8)


@pytest.mark.parametrize("how", ["abort", "remove"])
def test_a_pinned_prompt_that_is_not_computed_yet(how: str) -> None:
    engine = toy_engine(block_size=4, max_num_batched_tokens=8)
    request_id = engine.pin_prompt("system", MODULE)
    engine.step()
    if how == "abort":
        output = engine.abort(request_id)
        assert output is not None
        assert output.finish_reason == "abort"
    else:
        engine.unpin_prompt("system")
        assert drain(engine)[request_id].finish_reason == "abort", "whoever waits for it must hear of it"
    check_blocks(engine)
    assert engine.stats().num_used_blocks == 0
    assert not engine.has_unfinished
    with pytest.raises(RequestError, match=r"pinned prompt must be one of \[\], got 'system'"):
        engine.pinned_prompt("system")


def test_removal_leaves_the_requests_that_have_its_id_by_now() -> None:
    engine = toy_engine(block_size=4)
    engine.pin_prompt("system", MODULE, request_id="a")
    drain(engine)
    engine.add_request([40, 41], GREEDY, request_id="a")
    engine.step()
    engine.unpin_prompt("system")
    assert drain(engine)["a"].outputs[0].token_ids == greedy([40, 41], 8)
    check_blocks(engine)


def test_a_generated_id_is_not_that_of_an_output_that_waits() -> None:
    engine = toy_engine(block_size=4, max_num_batched_tokens=8)
    engine.pin_prompt("system", MODULE, request_id="request-0")
    engine.unpin_prompt("system")
    assert engine.add_request([40, 41], GREEDY) == "request-1"
    assert drain(engine)["request-0"].finish_reason == "abort"


def test_a_pinned_prompt_is_found_under_its_salt_alone() -> None:
    engine = toy_engine(block_size=4)
    engine.pin_prompt("system", MODULE, cache_salt="tenant")
    drain(engine)
    for salt, num_cached_tokens in (("tenant", 20), ("", 0), ("other", 0)):
        request_id = engine.add_request([*MODULE, 40], GREEDY, cache_salt=salt)
        assert drain(engine)[request_id].num_cached_tokens == num_cached_tokens
    check_blocks(engine)


@pytest.mark.parametrize("is_computed", [True, False])
def test_a_reset_of_the_prefix_cache_computes_pinned_prompts_again(is_computed: bool) -> None:
    engine = toy_engine(block_size=4, num_kv_blocks=20, max_model_len=40, max_num_batched_tokens=8)
    first = engine.pin_prompt("system", MODULE)
    if is_computed:
        drain(engine)
    else:
        engine.step()
    beside = engine.add_request([40, 41, 42, 43, 44], GREEDY)
    engine.step()
    engine.reset_prefix_cache()
    outputs = drain(engine)
    assert outputs[beside].outputs[0].token_ids == greedy([40, 41, 42, 43, 44], 8)
    assert engine.stats().num_prompt_tokens == 5 + len(MODULE) * (1 + is_computed)
    assert is_computed or outputs[first].finish_reason == "stop"
    assert engine.stats().num_used_blocks == 6
    check_blocks(engine)
    for index in range(6):
        engine.add_request([index] * 30, GREEDY)
    drain(engine)
    request_id = engine.add_request([*MODULE, 50], GREEDY)
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 20
    assert output.outputs[0].token_ids == greedy([*MODULE, 50], 8)
    engine.unpin_prompt("system")
    assert engine.stats().num_used_blocks == 0


def test_the_log_names_a_prompt_that_cannot_be_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever pinned it has had an answer before."""
    engine = toy_engine(block_size=4)
    engine.pin_prompt("system", MODULE)
    drain(engine)
    engine.reset_prefix_cache()
    engine.model.fail = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError) as error:
        drain(engine)
    for request_id in list(engine.requests.active):  # as AsyncEngine does
        engine.abort(request_id, error.value)
    assert engine.pinned_prompts.sequences == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("pinned prompt 'system' was not computed and is lost: ")
    assert "the model broke" in message


def test_a_reset_of_a_sleeping_engine_leaves_its_pinned_prompts_to_wake_up() -> None:
    engine = toy_engine(block_size=4)
    engine.pin_prompt("system", MODULE)
    drain(engine)
    engine.sleep()
    engine.reset_prefix_cache()
    assert not engine.has_unfinished
    engine.wake_up()
    assert engine.stats().num_used_blocks == 6
    check_blocks(engine)


def test_what_is_refused() -> None:
    engine = toy_engine(block_size=4, num_kv_blocks=20, max_model_len=40)
    engine.pin_prompt("a", MODULE)
    drain(engine)
    with pytest.raises(RequestError, match="name must be new, got 'a', which is a pinned prompt already"):
        engine.pin_prompt("a", [1])
    with pytest.raises(RequestError, match="must fit into 4 more blocks of the KV cache, got 6 blocks"):
        engine.pin_prompt("b", MODULE)
    for call in (engine.pinned_prompt, engine.unpin_prompt):
        with pytest.raises(RequestError, match=r"pinned prompt must be one of \['a'\], got 'b'"):
            call("b")
    with pytest.raises(RequestError, match="pinned prompts need enable_prefix_caching=True, got False"):
        toy_engine(enable_prefix_caching=False).pin_prompt("a", MODULE)
    assert not engine.has_unfinished
    check_blocks(engine)

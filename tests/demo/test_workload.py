from extproc.demo.workload import ChatSpec, make_chat


def test_equal_specs_make_equal_workloads_and_other_seeds_others() -> None:
    spec = ChatSpec(sessions=6, turns=3)
    assert make_chat(spec) == make_chat(spec)
    assert make_chat(spec) != make_chat(ChatSpec(seed=2, sessions=6, turns=3))
    assert spec.requests == 18


def test_a_conversation_grows_and_keeps_its_beginning() -> None:
    session = make_chat(ChatSpec(sessions=1, turns=3)).sessions[0]
    first, second, third = (session.messages(turn) for turn in range(3))
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]


def test_sessions_of_one_tenant_share_the_system_prompt_only() -> None:
    workload = make_chat(ChatSpec(sessions=30, tenants=3))
    systems = {session.system for session in workload.sessions}
    assert len(systems) == 3
    questions = [turn.user for session in workload.sessions for turn in session.turns]
    assert len(set(questions)) == len(questions)


def test_lengths_and_times_follow_the_spec() -> None:
    spec = ChatSpec(sessions=40, user_tokens=100, reply_tokens=40, arrival_s=10)
    workload = make_chat(spec)
    starts = [session.start_s for session in workload.sessions]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert starts[-1] <= 10
    turns = [turn for session in workload.sessions for turn in session.turns]
    mean_user_bytes = sum(len(turn.user) for turn in turns) / len(turns)
    assert 350 < mean_user_bytes < 470
    assert all(20 <= turn.max_tokens <= 60 for turn in turns)


def test_a_conversation_may_open_with_a_longer_text() -> None:
    spec = ChatSpec(sessions=40, user_tokens=50, opening_tokens=400)
    openings, *rest = zip(*(session.turns for session in make_chat(spec).sessions), strict=True)
    assert 1400 < sum(len(turn.user) for turn in openings) / len(openings) < 1850
    assert max(len(turn.user) for turns in rest for turn in turns) < 350

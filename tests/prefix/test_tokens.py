import pytest

from extproc.prefix.tokens import BytesPerToken


def test_the_prior_holds_until_something_is_reported() -> None:
    ratio = BytesPerToken(4.0)
    assert ratio.of("m") == ratio.mean == 4.0


def test_a_model_is_learned_on_its_own_and_the_mean_follows() -> None:
    ratio = BytesPerToken(4.0)
    for _ in range(200):
        ratio.learn("dense", 2000, 1000)
    assert ratio.of("dense") == pytest.approx(2.0)
    assert ratio.of("unseen") == pytest.approx(2.0, abs=0.01)
    ratio.learn("sparse", 6000, 1000)
    assert ratio.of("sparse") == 6.0
    assert ratio.of("dense") == pytest.approx(2.0)


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 10), (10, 0), (-1, 5), (1, 1000), (100_000, 1)])
def test_what_cannot_be_one_text_prompt_teaches_nothing(prompt_bytes: int, tokens: int) -> None:
    ratio = BytesPerToken(4.0)
    ratio.learn("m", prompt_bytes, tokens)
    assert ratio.of("m") == 4.0


def test_client_chosen_names_cannot_grow_the_table_without_bound() -> None:
    ratio = BytesPerToken(4.0)
    for number in range(1500):
        ratio.learn(f"model-{number}", 4000, 1000)
    assert len(ratio._by_model) == 1000


def test_a_report_of_many_requests_weighs_like_as_many_reports() -> None:
    one, many = BytesPerToken(4.0), BytesPerToken(4.0)
    for _ in range(20):
        one.learn("m", 2000, 1000)
    many.learn(None, 40_000, 20_000, requests=20)
    assert many.mean == pytest.approx(one.mean)
    assert many.of("m") == many.mean

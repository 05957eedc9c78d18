"""Terms of a text; the expected terms are those of Lucene 9.5."""

from __future__ import annotations

import pytest

from envkit.environments.webshop.search.analysis import terms_of, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Can't stop Dr. Martens' O'Neill's", "Can't stop Dr Martens O'Neill's"),
        ("2.5fl.oz 3,500mAh 1,a a.1 a:b 1:2", "2.5fl.oz 3,500mAh 1 a a 1 a:b 1 2"),
        ('wi-fi 802.11ac a_b __c __ 42"w', "wi fi 802.11ac a_b __c 42 w"),
        ("❤️😀👨‍👩‍👧 👍🏻", "❤️ 😀 👨‍👩‍👧 👍🏻"),  # joined emoji are one word
        ("🇩🇪 1️⃣ #️⃣ # * ™", "🇩🇪 1️⃣ #️⃣ ™"),
        ("漢字かなカタカナ 한국어 สวัสดี", "漢 字 か な カタカナ 한국어 สวัสดี"),
        ('א"ב cafe\u0301 na\xefve\xad ½', 'א"ב cafe\u0301 na\xefve\xad'),
        ("x" * 300 + " y", "x" * 255 + " " + "x" * 45 + " y"),
    ],
)
def test_text_is_split_at_the_word_boundaries_of_lucene(text: str, words: str) -> None:
    assert list(words_of(text)) == words.split(" ")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Women\u2019s and men's SHOES to THE", "women men shoe"),
        ("ponies as is us caresses cement", "poni us caress cement"),
        ("rationalize hopping falling generically", "ration hop fall gener"),
        ("possibly noisily apology", "possibl noisili apolog"),  # rules that Porter added later
        ("trekking revving", "trek rev"),  # the published stemmer keeps these double consonants
        ("\xc9COLE \u0130", "\xe9cole i"),
    ],
)
def test_words_are_reduced_to_the_terms_of_lucene(text: str, terms: str) -> None:
    assert terms_of(text) == terms.split()

"""The letter that a text chooses. A text is read as a whole: the words before the letter and those behind it are known
forms, and whatever else is said (a second letter, a negation, a doubt) makes it no choice."""

from __future__ import annotations

import functools
import re
from typing import ClassVar

from pydantic import Field

from roll.configs.base import Config
from roll.extras.maths.prose import ALTERNATIVES, DOUBTS, FAULTS, NEGATIONS, RETRACTIONS, denied, leads_to
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, all_boxed, last_box, last_boxed, last_group
from roll.rewards.types import ANSWER_CPU_S, RewardResult, RuleVerifier, Sample

_BEFORE = r"(?:\\[(\[]|[\s*_`$(\[{\"'“]){0,10}"
_COMMAND = r"(?:\\(?:text|mathrm|mathbf|textbf|textrm|mathit|bf|rm|boxed)\s{0,3}\{?[\s({\[*]{0,5})?"
_AFTER = r"(?:\\[)\]]|[\s*_`$)\]}\"'”]){0,10}"
_ANSWER = (
    r"(?:\b(?:answer|option|choice|antwort|réponse|respuesta|resposta|risposta|ответ)\b|答案|答え|选项|정답)"
    r"(?:\s+(?:correcta|correta|corretta|correcte|finale?))?"
)
_NOUN = rf"(?:{_ANSWER}|letter|solution|response|selection|statement|alternative)"
_GOOD = r"(?:best|correct|right|final|proper|appropriate|accurate|suitable|true|only|most\s+\w+)"
_OPENING = (
    r"(?:(?:so|thus|therefore|hence|then|finally|clearly|in conclusion|overall|consequently|accordingly|in summary"
    r"|only|we conclude that|this means|i think|i believe)\b[\s,:]{0,3})?"
)
_IS = (
    r"(?:\bis\b|\bare\b|\bmust be\b|\bshould be\b|\bwould be\b|\bwill be\b|\bhas to be\b|=>|[:：=]|->|→|是|为|选|は|은"
    r"|\b(?:ist|lautet|est|es|é|è)\b|(?<=\s)[-–—](?=\s))"
    r"(?:[\s*_:,]{0,5}\b(?:therefore|thus|clearly|then|hence|indeed)\b,?)?"
)
_FORMS = (
    # The best answer (to this question) is (option) …
    rf"(?:(?:the|my|our)\s+)?(?:{_GOOD}[\s*_]+){{0,3}}{_NOUN}(?:\s+{_NOUN})?"
    rf"(?:\s+(?:here|(?:to|for|of)\s+(?:this|the)\s+(?:question|problem)))?[\s*_]{{0,10}}{_IS}",
    r"(?:i|we)(?:\s+(?:would|will|must|should|'d|'ll)|['’](?:d|ll))?\s+"
    r"(?:choose|pick|select|go with|answer|say|opt for)",
    r"(?:it|this|that|which)(?:\s+(?:is|must be|should be|has to be)|['’]s)",
    r"(?:let['’]s\s+|let\s+us\s+)?(?:choose|select|pick|mark|go\s+with)",
    rf"{_GOOD}\s*[:：]",
    r"(?:因此|所以|故|应|本题){0,3}(?:答案|正确答案|选项|故选|选择|选)(?:应该)?[\s*]{0,3}(?:是|为|选|[:：])?",
    r"(?:=>|→|->|[-*•#>])",
)
_NAMED = rf"(?:(?:the\s+)?{_NOUN}[\s*_:]{{1,5}})?"
_NEGATION = re.compile(
    rf"{NEGATIONS}|{FAULTS}|{DOUBTS}|{ALTERNATIVES}|\b(?:but|both|than|rather|instead|also|wait|actually|hmm|unlike|all|any"
    r"|least|versus|vs)\b|除",
    re.IGNORECASE,
)
"""What turns a letter among free words into something else than a choice. Words of an option are not looked at."""
_ABOVE = re.compile(r"(?<=[):.]\s)(?:all|none|both|neither) of (?:the above|the other\w*|these|them)", re.IGNORECASE)
"""An option's usual words."""
_REASON = re.compile(r"[\s,;:—–-]{0,5}(?:because|since|as|for|due to|given that|so that)\b", re.IGNORECASE)
_PRAISE = re.compile(
    rf"\s+(?:is|seems|must be|would be|should be)\s+(?:(?:the|a)\s+)?"
    rf"(?:(?:{_GOOD}\s*)+(?:{_NOUN}|one)?|answer\b)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_RETRACTED = re.compile(rf"(?:^|[.!?;\n—–-])[\s*]*{RETRACTIONS}(?!\s+(?:other|need))", re.IGNORECASE)
_UNDECIDED = re.compile(rf"{DOUBTS}|{ALTERNATIVES}", re.IGNORECASE)
_DENIED = re.compile(rf"{NEGATIONS}|{FAULTS}|\b(?:but|both|than)\b", re.IGNORECASE)
_LEFT = re.compile(r"\bleav(?:es?|ing)\b", re.IGNORECASE)
_STATES_LETTER = re.compile(
    rf"\b(?:is|are|be|left with|leav(?:es?|ing)(?: us)?(?: with| only)?|corresponds? to|match(?:es)?|makes|{_NOUN}"
    r"|(?:es|est|è|é|ist) (?:la|el|l['’]|o|a))[\s:*_(]{0,10}$",
    re.IGNORECASE,
)
_CLAUSE_START = re.compile(r"(?:^|[,:;]\s|\b(?:so|thus|hence|therefore|then)\s)[\s*_(]{0,10}$", re.IGNORECASE)
_SPEAKS_OF_OPTIONS = re.compile(rf"\b(?:options?|choices?|answers?|alternatives?|one|{_GOOD})\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=\w[.!?])\s|\n")
_WORD = re.compile(r"\w+")
_LABELLED = re.compile(r"[\s*(>-]{0,10}[A-Z][).:]")
_LABEL = re.compile(r"\n|(?<!\w)[A-Z][).:\]]\s")
_MOST_BEHIND = 1_000_000
"""Characters behind a choice that are read."""


class ChoiceReader:
    """Reads the letters from A to ``last``."""

    def __init__(self, last: str) -> None:
        letter = f"[A-{last}]"
        # Bounded repetitions: a policy that writes thousands of blanks must not cost the square of them.
        self._letter = rf"{_BEFORE}{_COMMAND}{_BEFORE}(?P<letter>{letter})(?![^\W_]|['’]\w|[+#])"
        self._small = self._letter.replace(letter, f"[A-{last}a-{last.lower()}]")
        forms = "|".join(_FORMS)
        self._said = re.compile(
            rf"[\s*_>#\"']{{0,10}}(?i:{_OPENING}(?:(?:{forms})[\s*_:：]{{0,10}})?{_NAMED}){self._letter}"
        )
        self._alone = re.compile(rf"(?i:{_NAMED}){self._small}{_AFTER}[.,:;!。]{{0,3}}{_AFTER}")
        self._phrase = re.compile(
            rf"(?i:{_ANSWER})[\s*_]{{0,10}}(?i:{_IS})[\s*_:：]{{0,10}}(?i:{_NAMED}){self._letter}"
        )
        self._small_phrase = re.compile(
            rf"(?i:{_ANSWER}[\s*_]{{0,10}}{_IS}[\s*_:]{{0,10}}{_NAMED}){self._small}{_AFTER}\.?\s*$"
        )
        other = rf"(?<![\w'’]){letter}(?![\w'’])"
        self._others = re.compile(
            rf"(?!I\s+[a-z]|I['’]|A\s+[^\W\d_]{{2,}}){other}|\([a-{last.lower()}]\)|\b{letter}(?=,)"
        )
        self._against = re.compile(
            rf"[\s,;(—–-]{{0,5}}(?:and\s+)?(?:not|rather than|instead of)\s+(?:{_NOUN}s?\s+)?"
            rf"(?:[\s(*]*{letter}[)\s*]*(?:,|or|nor|and)?){{1,5}}[\s.*)]*",
            re.IGNORECASE,
        )

    def whole(self, text: str, prompt: str = "") -> str | None:
        """The letter that a short text says, and nothing beside it: ``b``, ``(B)``, ``B. Paris``, ``It is B.``"""
        text = text.strip()
        if alone := self._alone.fullmatch(text):
            return alone["letter"].upper()
        said = self._said.match(text)
        return said["letter"] if said and self._is_final(text[said.end() :], said["letter"], prompt) else None

    def in_prose(self, text: str, prompt: str = "") -> str | None:
        """The letter behind the last "answer is" or "answer:", else the one that the last line says."""
        phrases = list(self._phrase.finditer(text))
        small = self._small_phrase.search(text[-200:])
        if small and (not phrases or phrases[-1].end() < len(text.rstrip()) - 20):
            return small["letter"].upper()
        if phrases:
            last = phrases[-1]
            before = text[max(0, last.start() - 200) : last.start()]
            sentence = re.split(r"[.!?;]\s|\n|,\s+(?:so|therefore|thus|hence)\b", before)[-1]
            if _NEGATION.search(sentence) or not self._is_final(text[last.end() :], last["letter"], prompt):
                return None
            return last["letter"]
        lines = text.strip().splitlines()
        # The options themselves are no choice.
        listed = lines[1:] and _LABELLED.match(lines[-1]) and _LABELLED.match(lines[-2])
        if not lines or listed:
            return None
        sentence = re.split(r"(?<=\w\w[.!?])\s", lines[-1].strip())[-1]
        return self.whole(lines[-1], prompt) or self.whole(sentence, prompt) or self._in_sentence(sentence)

    def _in_sentence(self, sentence: str) -> str | None:
        """The only letter of a sentence, where words state it: "we are left with B", "(B) is the one that fits"."""
        if "?" in sentence or _UNDECIDED.search(sentence):
            return None
        given, comma, clause = sentence.rpartition(", ")
        if not self._others.search(clause):
            given, comma, clause = "", "", sentence
        letters = list(self._others.finditer(clause))
        if len({match[0].strip("(),") for match in letters}) != 1 or _DENIED.search(_LEFT.split(clause)[-1]):
            return None
        before = given + comma + clause[: letters[0].start()]
        named = _STATES_LETTER.search(before) or (_CLAUSE_START.search(before) and _SPEAKS_OF_OPTIONS.search(sentence))
        return letters[0][0].strip("(),").upper() if named and leads_to(before) else None

    def _is_final(self, behind: str, letter: str, prompt: str) -> bool:
        """Tells whether what follows the letter leaves it the choice."""
        behind = re.sub(r"[^\S\n]+", " ", behind[:_MOST_BEHIND])
        end = _SENTENCE_END.search(behind)
        here, later = (behind[: end.start()], behind[end.end() :]) if end else (behind, "")
        return self._is_harmless(here, letter, prompt) and not _RETRACTED.search("\n" + later)

    def _is_harmless(self, rest: str, letter: str, prompt: str) -> bool:
        """Tells whether the rest of the sentence is the option's text, a reason, praise, or the letters it is not."""
        rest = _ABOVE.sub("", rest)
        bare = re.sub(rf"^{_AFTER}", "", rest)
        if not _WORD.search(rest):
            return "?" not in rest
        if self._against.fullmatch(bare) or _REASON.match(bare):
            return True
        if praise := _PRAISE.fullmatch(rest):
            return not _WORD.search(praise["rest"]) or _REASON.match(praise["rest"]) is not None
        if _is_option(bare, letter, prompt):
            return True
        separated = re.match(r"[\s*_`$)\]}\"'”]*[.):：,(—–-]|\s*\\(?:text|quad|,|;)|\s*[({$]|[)\]}]", rest) is not None
        return separated and "?" not in rest and not (self._others.search(bare) or _NEGATION.search(bare))


def _is_option(said: str, letter: str, prompt: str) -> bool:
    """Tells whether a question gives these words to the letter, as ``B) Paris``."""
    words = _WORD.findall(said.casefold())
    for label in re.finditer(rf"(?<!\w){letter}[).:\]]", prompt):
        option = _LABEL.split(prompt[label.end() :], maxsplit=1)[0].casefold()
        if _WORD.findall(option)[: len(words)] == words:
            return True
    return False


class MultipleChoiceConfig(AnswerConfig):
    """``args`` of ``multiple_choice``."""

    num_choices: int = Field(default=10, ge=2, le=26, description="Choices are the letters from A; 10 is A to J.")


class MultipleChoiceVerifier(RuleVerifier):
    """A letter: in ``<answer>``, in ``\\boxed{}``, behind "answer:" or "answer is", or as all that the last line says.

    The first of these marks that occurs decides. What it says is understood as a whole or is no answer: neither "A or
    B" nor "B? No, C", nor two boxes with different letters.
    """

    config_class: ClassVar[type[Config]] = MultipleChoiceConfig
    config: MultipleChoiceConfig
    cpu_seconds = ANSWER_CPU_S
    best = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._reader = _choices(self.config.num_choices)

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        assert isinstance(config, MultipleChoiceConfig)
        truth = sample.ground_truth
        if not isinstance(truth, str) or _choices(config.num_choices).whole(truth, sample.prompt) is None:
            raise ValueError(f"ground_truth: got {truth!r}, expected the letter of one of {config.num_choices}")

    def check(self, sample: Sample) -> RewardResult:
        """Raises ``ValueError`` when the ground truth is no letter."""
        self.check_row(self.config, sample)
        expected = self._reader.whole(sample.ground_truth, sample.prompt)
        answer = self.extract(sample.response, sample.prompt)
        return RewardResult(score=float(answer == expected), correct=answer == expected, answer=answer)

    def extract(self, response: str, prompt: str = "") -> str | None:
        """The chosen letter, upper case; ``None`` if there is none or more than one.

        Args:
            prompt: the question, for the words of its options.
        """
        if self.config.answer_pattern is not None:
            marked = last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
            return None if marked is None else self._reader.whole(marked, prompt)
        said = after_thoughts(response)
        box = last_box(said)
        if box is not None and denied(box[0], box[2]):
            return None
        for found in ([match[1] for match in ANSWER_TAG.finditer(said)], all_boxed(said)):
            letters = {self._reader.whole(last_boxed(marked) or marked, prompt) for marked in found}
            if found:
                return letters.pop() if len(letters) == 1 else None
        return self._reader.in_prose(said, prompt)


@functools.cache
def _choices(number: int) -> ChoiceReader:
    return ChoiceReader(chr(ord("A") + number - 1))

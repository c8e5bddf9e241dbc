"""Answers in sentences: the expression that a text states as its answer.

Sentences are read by their structure: a subject and what states ("is", "=", "gives"), an expression with what it counts
("42 red marbles"), and what follows. Nothing before the expression may deny, doubt or change it, and what follows must
be a phrase or a clause of its own (", since …", "for the 16 glasses"). Otherwise the whole sentence is the answer,
which equals no number.
"""

from __future__ import annotations

import re

from roll.extras.maths.phrases import meaning
from roll.extras.maths.units import MULTIPLIERS, canonical_unit, changes_number, is_unit

NEGATIONS = (
    r"(?:\b(?:not|no|none|never|neither|nor|nothing|nobody|cannot|hardly|barely|nicht|kein\w*|niemals|ne|pas|jamais"
    r"|nunca|jamás|não|non(?!-)|mai|не|нет|ни|nie|niet|geen)\b|n['’]t\b|[不没沒非未]|ない|ません|아니)"
)
FAULTS = (
    r"(?:\b(?:wrong(?:ly)?|incorrect(?:ly)?|false(?:ly)?|untrue|impossible|invalid|undefined|mistake\w*|fail(?:s"
    r"|ed)?|excluded?|exclud(?:es|ing)"
    r"|reject\w*|eliminat\w+|avoid\w*|refus\w*|contradict\w*|overcount\w*|disprov\w+|falsch|faux|falso|неверно)\b"
    r"|[❌✗✘])"
)
DOUBTS = (
    r"(?:\b(?:if|unless|whether|provided|maybe|perhaps|possibly|probably|might|(?-i:may)|could|guess\w*|doubt\w*"
    r"|unlikely|un\w*sure"
    r"|den(?:y|ies|ied)|tempt\w+|naive(?:ly)?|suppos\w+|assum\w+|imagine|thought|initially|at first|expects?"
    r"|suspect\w*|conjectur\w*|presum\w*|(?:(?:lower|upper) bounds?|estimates?|approximations?) (?:is|are|gives?)"
    r"|let['’]?s say|say(?=,)|wäre|würde|gäbe|serait|sería|fuera\w*|angenommen|supongamos|supposons|pretend"
    r"|hop(?:es?|ed)|wish\w*|wants?|wanted"
    r"|likes? to|so far|for now|vielleicht|wenn|vermutlich|peut-être|si|quizás?|tal vez|forse|talvez|если|возможно)\b"
    r"|可能|也许|如果|假设|似乎)"
)
ALTERNATIVES = r"(?:\b(?:or|either|oder|ou|или|except|besides|other than|except for)\b|[或]|除了)"
BOUNDS = (
    r"(?:\b(?:at least|at most|no more|no less|more|less|fewer|between|about|approximately|approx|around|roughly"
    r"|circa|ca|nearly"
    r"|almost|close|near|over|under|above|below|up to|than|exceed\w*|über|unter|hasta|mindestens|wenigstens"
    r"|como (?:máximo|mínimo)|al menos|au (?:plus|moins)|höchstens|etwa|ungefähr|mehr|weniger"
    r"|größer|kleiner|environ|presque|plus de|moins|casi|quasi|más|menos|mayor|menor|около|примерно|больше|меньше"
    r"|более)\b"
    r"|至少|最多|超过|少于|大于|小于|大约|大概|约|几乎|接近|[≈∼~])"
)
RETRACTIONS = (
    r"(?:no|not|wait|actually|but|however|though|yet|oops|sorry|correction|scratch that|hmm+|hold on"
    r"|on second thought|alternatively|unfortunately|except|unless|or|instead)\b"
)
"""What a sentence begins with that takes back what was said before it."""


_GOVERNED = re.compile(
    r"(?:(?:\bnot|n['’]t|\bnever|\bcannot|\brather than|\binstead of|\bexcept|\bbut(?=\s*$)|\bother than|\bneither"
    r"|\bnor|\bunlike|\bno longer|\bhardly|\bwrong(?:ly)? to|\bincorrect to|\b(?:false|wrong|incorrect|untrue) that)"
    r"(?:\s+(?!(?:is|are|was|were|equals|gives?|has|have|get|gets|but)\b)[^\s,.;:=]+){0,4}"
    r"|(?:n['’]t|\bnot|\bnever|\bnobody|\bno one)\b.{0,30}?\b(?:think|believes?|say|claim|agree|accept|suggest"
    r")\b[^.,;:]{0,60}|\bno way\b[^.,;:]{0,60}|\b(?:doubt|deny|false that|denies|reject)\b[^.,;:]{0,60}"
    r"|\b(?:wrong|incorrect|false|mistaken)\s+(?:answer|result|value|solution|number)?\s*(?:is|would be|was)?"
    r"|(?:n['’]t|\bnot)\s+(?:true|right|correct|the case)\s+that\b[^.;:]{0,60}"
    r"|\b(?:different|differs?|distinct|far|away|apart|aside)\s+from"
    r"|\b(?:twice|half|double)(?:\s+of)?)"
    r"[\s$*_(:=\\\[{]*$",
    re.IGNORECASE,
)
"""A negation that an expression's place is in, though its clause says something: "not equal to"."""
_RETRACTED = re.compile(
    r"[\s$).*\]\\,;:!?—-]*(?:(?:but|which|and|though|actually|however|no|that|this|it|the answer)\b[\s,.]*){0,4}"
    r"(?:(?:is|was|are|were|would|seems?|looks?|can|could|must|should|does|do|has|have|wo|ca)\b|['’]s\b)?\s*"
    r"(?:(?:be|to be|clearly|also|just|simply|obviously|certainly|definitely|surely|an?|the)\s+){0,2}"
    r"(?:not\b(?!\s+[$\\(]*[-−\d])|\w*n['’]t\b|cannot\b|wrong\b|incorrect|false\b|impossible|invalid|mistaken|fails\b|wait\b|too\b"
    r"|excluded|ruled out|rejected|discarded"
    r"|(?<=no)[,.!])",
    re.IGNORECASE,
)
TAKEN_BACK = re.compile(
    r"\b(?:that|this|it)(?:['’]s| is| was)\s+(?:\w+\s+)?(?:false|wrong|incorrect|a lie|not (?:right|correct|true|it|so"
    r"|the answer))\b|\b(?:that|this|it) isn['’]t (?:right|correct|true|it|the answer)\b",
    re.IGNORECASE,
)
CORRECTED = re.compile(
    r"\b(?:oops|correction|scratch that|on second thought|(?:made|is|was|contains) (?:an?|some) (?:error|mistake)"
    r"|(?:correct|right|actual|real|true) (?:answer|value|result) (?:is|was|should)|hmm+)\b|更正|修正|抱歉",
    re.IGNORECASE,
)
_PART_OF_TERM = re.compile(
    r"(?:[/^<>≠≤≥±√] ?|(?<=[^*\s])[*_]|(?<=[^\s])\+ ?|(?:\d|\b[a-zA-Z]|[)}]) ?[-−+*] ?|(?<![*\w])[-−]|[=$(] ?[-−] ?"
    r"|\\(?:cdot|times|div|pm|mp|n(?:eq?|ot|eg)|[lg](?:e|eq|t|eqslant)|sqrt) ?|\\d?frac ?\{[^{}]*\}? ?\{?|\d)\{?$"
)
_GOES_ON = re.compile(
    r"\s*\}*\s*(?:[/^_!]|[-−+<>](?=\s*[\d\\(a-z]\b)|\*(?!\*)|\\(?:cdot|times|div|pm|mp)\b|\$?\s*,?\s*(?:or|to)\s+"
    r"(?:\$|\\|\d|maybe|perhaps|possibly|else|even)|\$?\s*(?:\\text\{\s*)?(?:half|halves|percent of|times|squared|cubed"
    r"|of\b\s*\}?\s*\$?\d|dozens?|hundreds?|thousands?|\w*illions?|\w+(?:teen|[rfxghtnl])ths?)\b)"
)
"""What makes a box a part of a longer term, or one of two answers."""


def denied(before: str, behind: str) -> bool:
    """Tells whether the words around an answer that is marked say that it is none.

    >>> denied("The answer is not ", "."), denied("Since x is not 0, we get ", "."), denied("", " is wrong.")
    (True, False, True)
    """
    clause = re.split(r"[.!?;]\s|\n|\b(?:so|therefore|thus|hence|then|we get)\b", before[-300:])[-1]
    behind = re.sub(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{", "", behind[:200])
    return bool(_GOVERNED.search(clause) or _RETRACTED.match(behind) or TAKEN_BACK.search(behind))


def is_part(before: str, behind: str) -> bool:
    """Tells whether what stands between is a part of something longer: ``2 \\cdot``, ``^2``, "or 31", "million"."""
    before = re.sub(r"</?\w+>", ".", before[-60:])
    return bool(_PART_OF_TERM.search(before) or _GOES_ON.match(behind[:60]))


MAX_SEARCHED_CHARS = 4000
"""Only this much of a response's end is searched for an expression that nothing marks as the answer."""

# --- formulas and sentences -------------------------------------------------------------------------------------------

_FORMULA = "[\ue000-\uf8ff]"
"""What stands for a formula between dollar signs: a sign of the private use area for each."""
_MATHS = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\n]+?)(?<!\\)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}(.+?)\\end\{(?:align|equation|gather)\*?\}",
    re.DOTALL,
)
"""A dollar sign before a digit closes nothing: ``$400 + $60``."""
_ROWS = re.compile(r"\\begin\{(?:aligned|split|gathered)\}(.+)\\end\{(?:aligned|split|gathered)\}|(.+)", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{([^{}]*)\}")
_SENTENCE_IN_FORMULA = re.compile(r"\\text[a-z]*\s*\{[^{}]*\s[^{}]*\s")
_EVENT = re.compile(
    r"^(?:\\?[a-zA-Z]{1,4}|\\(?:mathbb|mathrm|text|operatorname)\{\w+\})\s*\((?=[^()]*(?:[=|<>]|\\mid|\\cap"
    r"|\\cup))[^()]*\)\s*=\s*"
)
"""``P(X = 2) =``"""
_IMPLIED = re.compile(r"\\(?:Rightarrow|Longrightarrow|implies|therefore|Leftrightarrow|iff)(?![a-zA-Z])|[⇒∴]")
_OPERATION = re.compile(
    r"^(?:\\(?:int|iint|oint|sum|prod|lim)(?![a-zA-Z])[^<>≠≈≤≥]*(?<!\\)=(?!.*\\(?:ne|neq|approx|l[et]|g[et]|leq|geq)\b)"
    r"|[^=<>]*\\[lc]?dots(?![a-zA-Z])[^=<>]*=)",
    re.DOTALL,
)
"""``\\int … =``: the value of an operation that is not carried out here stands behind it."""
_LETTERS = re.compile(r"[a-zA-Z]+['′]*")
_PROVED = re.compile(
    r"(?:\s*(?:\$\s*\\(?:blacksquare|square|Box|qed)\s*\$|\\(?:blacksquare|square|Box|qed)\b|[∎■□]|Q\.?E\.?D\b\.?"
    r"|(?<=[.!]\s)(?:Done|We are done)[.!]))+\s*$"
)
_CLEANED = (
    (re.compile(r"^(?:[^\S\n]*(?:#{1,6}(?=\s)|[-•>*+](?=\s+\D)|=>|[→⇒]))+[^\S\n]*", re.MULTILINE), ""),
    (re.compile(r"[✓✔✅☑]\ufe0f?"), ""),
    (re.compile(r"(?<![\w*])(\*\*|__)(?=[^\s*])([^*\n]+?)\1(?![\w*])"), r"\2"),
    (
        re.compile(
            r"(?<=[\u3000-\u9fff\uff00-\uffef])(?=[-−\d$\\(\ue000-\uf8ff])|(?<=[\d)%\ue000-\uf8ff])(?=[\u3000-\u9fff])"
        ),
        " ",
    ),
    (re.compile(r"(?:です|である|だ|となる|입니다|이다)(?=[\s。.]*$)"), ""),
)
"""What is no part of a sentence: ticks, bold, marks of lists; blanks between Chinese signs and numbers are missing."""
_SENTENCE_END = re.compile(
    r"(?<!\bi\.e)(?<!\be\.g)(?<!\bapprox)(?<!\bp)(?<!\bno)(?<!\bfig)(?<!\beq)(?:\.|\?)(?=[\"”)]*(?:$|\s+[^a-z\s]))"
    r"|!(?=\s*$|\s+[^a-z\s])"
    r"|\n\s*\n|\n(?!\s*[a-z]{2,}\s)"
)
"""``5! ways`` ends none, neither does a line that goes on in small letters."""
_ASIDE = re.compile(r"\s\((?!\s*mod)([^()]*[^\W\d_]{3,}[^()]*)\)")
_SUBSTANCE = re.compile(r"\d|\\(?!f?boxed\b|fbox\b)[a-zA-Z]|[π∞√]")


_FULL_WIDTH = str.maketrans({"。": ". ", "，": ", ", "；": "; ", "：": ": ", "？": "? ", "！": "! ", "．": "."})


_NAMES_SUM = re.compile(r"[^=<>]*[a-zA-Z)}][^=<>\\]*[-+][^=<>]*[a-zA-Z][^=<>]*=")


class _Formulas:
    """Formulas between dollar signs, each of which one sign stands for, so that sentences can be taken apart."""

    def __init__(self) -> None:
        self._contents: list[str] = []

    def hide(self, text: str) -> str:
        """The text with a sign for each formula; a sentence in a formula is one."""
        return _MATHS.sub(self._hidden, re.sub(_FORMULA, "", text))

    def _hidden(self, match: re.Match[str]) -> str:
        content = _last_row(next(group for group in match.groups() if group is not None).strip())
        content = _EVENT.sub("", _OPERATION.sub("", _IMPLIED.split(content)[-1].strip()))
        if _SENTENCE_IN_FORMULA.match(content):
            return " " + _TEXT.sub(r"\1", content) + " "
        self._contents.append(content)
        return chr(0xE000 + len(self._contents) - 1)

    def show(self, text: str) -> str:
        """The text with its formulas again; those that a conjunction joins are a list."""
        if re.search(_FORMULA, text):
            text = re.sub(r",?\s+and\s+", ", ", re.sub(r",?\s+or\s+", r" \\text{ or } ", text))
        return re.sub(_FORMULA, lambda sign: self._contents[ord(sign[0]) - 0xE000], text)

    def last_named(self, run: str) -> str:
        """Of equations side by side the last one, if it says what was asked for: ``m = 3`` and ``m + n = 8``."""
        last = run.split()[-1]
        if re.match(_FORMULA, last) and _NAMES_SUM.match(self._contents[ord(last[0]) - 0xE000]):
            return last
        return run

    def is_substance(self, text: str, named: bool = False) -> bool:
        """Tells whether signs say more than the name of something, as ``C`` and, unless ``named``, ``$n$`` do."""
        return _SUBSTANCE.search(text) is not None or any(
            named or not _LETTERS.fullmatch(self._contents[ord(sign) - 0xE000]) for sign in re.findall(_FORMULA, text)
        )


def _last_row(rows: str) -> str:
    """Of equal expressions below each other the last one; all, where each row says something of its own."""
    match = _ROWS.fullmatch(rows.strip())
    parts = [row.strip() for row in re.split(r"\\\\(?:\[\w.]+\])?", (match[1] or match[2]) if match else rows)]
    parts = [row for row in parts if row]
    lefts = [row.partition("=")[0].strip(" &") for row in parts if "=" in row]
    named = {left for left in lefts if left.isalpha()} or {left for left in lefts if left}
    steps = len(lefts) == len(parts) > 0 and len(named) == 1 and lefts[-1] in named | {""}
    return parts[-1].replace("&", " ") if steps or len(parts) == 1 else rows


def _sentences(text: str) -> list[str]:
    ends = [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    parts = (text[begin:end].split() for begin, end in zip([0, *ends], ends, strict=False))
    return [" ".join(words) for words in parts if words]


# --- what is said before an expression --------------------------------------------------------------------------------

_WORD = r"(?<![\\\w{])[^\W\d_]{2,}"
_PROSE = re.compile(rf"\$[^$]*[^\s$][^$]*\$|\\[(\[]|\\boxed|{_FORMULA}|{_WORD}[,:]?\s+(?:{_WORD}|[-−(]?\d|\(?[A-J]\b)")
"""Two words, a word before a number, or LaTeX that is marked as such: the expression in it must be found."""
_CUE = re.compile(
    r"(?:\banswer\b[\s*_]{0,5}(?:(?:is|are|should be|must be|would be|equals)\b|:|=)"
    r"|\b(?:antwort|lösung|ergebnis)\b\s*(?:(?:ist|lautet|beträgt)\b|:)"
    r"|\b(?:réponse|résultat|respuesta|resultado|resposta|risposta)\b\s*(?:(?:finale|final)\s+)?(?:(?:est|es)\b|é\b"
    r"|è\b|:)"
    r"|\bответ\b\s*[:—–-]|\b(?:antwoord|svar|odpowiedź|cevap|đáp án)\b\s*:"
    r"|(?<!不)选(?:择)?\s*[:：]?|答案?\s*(?:是|为|為|等于|[:：=])|答え\s*[はを:：]|(?:정답|답)\s*[은:：])[\s*_:：]{0,5}",
    re.IGNORECASE,
)
_CUED = re.compile(
    rf"^(?:\\text\s*\{{\s*|(?:so|thus|hence|therefore),?\s*|the\s+|final\s+)*{_CUE.pattern}\s*\}}?", re.I
)
"""A whole answer that begins with "the answer is"."""
_CLAUSE = re.compile(
    r",\s+or,?\s+(?=in\b|equivalently|simply)|\b(?:i\.e\.|that is|namely),?(?=\s|$)|[.!?;:,—]\s|\b(?:so|therefore"
    r"|thus|hence|then|giving)\b",
    re.IGNORECASE,
)
_COPULA = r"(?:is|are|was|were|be|equals?|ist|sind|beträgt|lautet|es|son|est|sont|è|é)"
_SURELY = r"(?:(?:also|thus|therefore|hence|then|indeed|clearly|exactly|precisely|just|simply|only|now|equal to)\s+)*"
_OF_SUBJECT = re.compile(
    rf"\b(?:of|that|who|which|whose|where|for|to|with|without|by|in|between)\b[^,;]*?(?=\b{_COPULA}\s+{_SURELY}$)", re.I
)
"""A negation in it denies no value: "the number of integers that are not prime is"."""
_DOUBTED = re.compile(rf"{NEGATIONS}|{FAULTS}|{DOUBTS}", re.IGNORECASE)
_CHANGED = re.compile(
    rf"{ALTERNATIVES}|比(?![是为值例])[^，]*$|(?:{BOUNDS}|\b(?:twice|half|double|times|minus"
    rf"|negative)\b)\s*(?:\w+\s+){{0,3}}$",
    re.IGNORECASE,
)
"""What changes an expression that stands behind it, if no word that states is between them."""
_COUNTERFACTUAL = re.compile(r"\b(?:if|unless|without|suppos\w+|assum\w+|were|had)\b.*\bwould\b", re.IGNORECASE)
_SUPPOSED = re.compile(
    r"\W*(?:suppos\w+|assum\w+|imagine|angenommen)\b(?!.*\b(?:so|then|thus|hence|therefore|gets?|gives?|obtain"
    r"|yields?)\b)",
    re.I,
)
_INDEFINITE = re.compile(
    r"\W*(?:(?:some|another|any|many|most|several|among)\b"
    r"|an?\s+(?:minimum|maximum)\s+of|(?:an?|one)\b(?!\s+total)[^,]*\b(?:is|are|was|were|be|would|might|could|can)\b)",
    re.IGNORECASE,
)
"""One of several: "an upper bound is", "some would say"."""
_SEARCHED = re.compile(
    r"\b(?:to|would|will|must|should|can)\s+(?:check|verify|show|prove|find|answer|say|think|claim|test|try|consider"
    r"|examine|exclude)$",
    re.IGNORECASE,
)
_BUT = re.compile(r"\b(?:but|rather|sondern|sino|mais)\b", re.IGNORECASE)
_NOT_THIS_BUT = re.compile(
    r"(?:\b(?:not|nicht|no|pas)|n['’]t)\s+(?:\S+\s+){1,3}(?:but|rather|sondern|sino|mais)\s*$", re.IGNORECASE
)
_LEADS = re.compile(
    r"\b(?:(?:total|sum|product|area|perimeter|volume|length|value|cost|price|amount|result|answer|probability|average"
    r"|distance|speed|number|score|profit|radius|slope|maximum|minimum|remainder|ratio|rate|limit|height|width|weight"
    r"|age|time|loss|discount|difference|quotient|balance|angle|income|change) of"
    r"|(?:exactly|precisely|only|iff) (?:for|when|if)|exactly|only|precisely|left with|up with|(?:rose|ris\w+"
    r"|increas\w+|decreas\w+|gr[eo]w\w*|dropp\w+|fell|exceeds|differ|reduc\w+|chang\w+) by|(?:satisfied|true|valid"
    r"|holds?) for all|(?:equal|up|down|out|come|add|sum|amount|lead|tend|converge|\w+(?:s|ed|ing)) to|(?:es|son"
    r"|est|sont)(?: \w+)? de|Zahl|Wert|Anzahl"
    r"|therefore|thus|so|hence|then|answer|result|value|total|option|choice)$"
    r"|\b(?:ist|sind|beträgt|gibt|ergibt|hat|macht|bleiben)\s+(?:\w+\s+){0,4}\w+$|等于$"
    r"|\b(?:takes?|took|costs?|gives?|gave|leaves?|owes?|pays?|paid|saves?)\s+(?-i:[A-Z])\w*$",
    re.IGNORECASE,
)
"""What states an expression behind it though the next rule says otherwise."""
_NO_LEAD = re.compile(
    r"(?:\b(?i:of|than|being|such that|outside|inside|beyond|within|towards?|past|across|along|via|onto|to|by|with"
    r"|without|from|per|modulo?|versus|vs|plus|minus|over|under|above|below|between|among|and|nor"
    r"|but|when|where|while|because|since|let|suppose|assum\w+|consider\w*|try\w*|tried|take|say|example|like|as"
    r"|least|most|out of|up to|\d+ to"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|page|chapter|theorem|lemma|corollary|proposition|equation"
    r"|question|problem|step"
    r"|section|figure|table|case|part|line|exercise|item|note|rule|property|method|attempt|version|level|grade|divid\w+"
    r"|exceed\w*|another|other|next|previous|last|first|second|third|all|every|each|any|some|base|power|degree|for"
    r"|until"
    r"|before|after|against|nearly|almost|approximately|about|roughly|around|ca|twice|half|double|times|minus"
    r"|mindestens|höchstens|etwa"
    r"|ungefähr|environ|casi|quasi|the|these|those|this|it|an?|als|de|von|par|um|bis|di|чем|от|на)"
    r"|[比第除被的过超少多差步题題每若当當设設于於约約从從至在乘减減加和与與或把将將用按])$"
)
"""Words between which and the expression nothing is stated: prepositions, names of numbered things, capitals. Any other
word is taken for a verb."""
_NAMED = re.compile(r"\b[A-Z]\w*$")
"""``By Theorem 12``, ``AMC 12``; in other languages nouns may have capitals."""
_EXAMPLE = re.compile(
    r"\b(?:for (?:example|instance)|e\.g\.|such as|would have)(?![^\W_])|zum Beispiel|par exemple|例如|比如", re.I
)


def leads_to(lead: str) -> bool:
    """Tells whether what stands before an expression states it as the value of something."""
    lead = _NOT_THIS_BUT.sub("", lead.rstrip(" *_$(\"“'"))
    sentence = lead.replace("if and only if", "iff")
    clause = (sentence if lead.endswith((",", ";")) else _CLAUSE.split(sentence)[-1]).strip()
    said = _OF_SUBJECT.sub("", clause + " ")
    return not (
        denied(lead, "")
        or _COUNTERFACTUAL.search(sentence)
        or _SUPPOSED.match(sentence)
        or (_INDEFINITE.match(clause) and not lead.endswith(","))
        or _SEARCHED.search(clause)
        or _EXAMPLE.search(sentence)
        or _DOUBTED.search(said)
        or _CHANGED.search(re.split(rf"\b{_COPULA}\b|=", said)[-1])
        or (_NO_LEAD.search(clause) and not _LEADS.search(clause))
        or (_NAMED.search(clause) and not _LEADS.search(clause) and (_ENGLISH.search(clause) or " " not in clause))
    )


_ENGLISH = re.compile(
    r"\b(?:the|of|we|and|to|it|this|that|there|by|for|with|from|as|he|she|his|her|now|i)\b", re.IGNORECASE
)
_STATES_NUMBER = re.compile(
    rf"\b(?:{_COPULA}|been|being|equal|has|have|had|get|gets|got|f[io]u?nds?|left|conclude\w*|ha(?:s|ve|d)|(?:sum"
    rf"|amount|come|adds|total|hold|intersect|meet)\w*"
    r"|g[ia]v\w+|obtain\w*|yield\w*|mak\w+|made|becom\w+|leav\w+|simplif\w+|evaluat\w+|result\w*|reach\w*|follow\w*"
    r"|deduc\w+"
    r"|comput\w+|determin\w+|arriv\w+|tak\w+|took|need\w*|cost\w*|pa(?:y|ys|id)|earn\w*|count\w*|remain\w*|answer"
    r"|so|thus|hence|exactly"
    r"|therefore|only|converge\w*|tends?|work\w* out|exists?|turns? out|[a-z]+(?:es|ed|s) to|by)\b|['’]s\b|=|:"
    r"|^\W*\w*\W*$",
    re.IGNORECASE,
)
"""What states a number of nothing: "we get 28", but not "the book says 28"."""


def _states_number(lead: str) -> bool:
    """Tells whether words state a number that counts nothing; those of other languages are trusted."""
    clause = _CLAUSE.split(lead.rstrip(" *_$("))[-1]
    return not _ENGLISH.search(clause) or _STATES_NUMBER.search(clause) is not None


# --- what is said behind it -------------------------------------------------------------------------------------------

_REASON = re.compile(r"(?:since|because|as|given that|so that|due to|thanks to)\b", re.IGNORECASE)
_OTHER = re.compile(
    r"(?:[,;—–-]+\s*not|(?:[,;—–-]+\s*)?(?:(?:and|but)\s+not|rather than|instead of|unlike|as opposed to))"
    rf"\s+(?:the\s+)?(?=$|[-−]?\d|{_FORMULA})",
    re.IGNORECASE,
)
"""``not 13``: what is denied is another expression."""
_CIRCUMSTANCES = (
    "with|using|where|when|while|whereas|for|during|at|after"
    r"|(?:from|by|in|on|per|within|through|across|without)(?=\s+[^\W\d_])|of\s+(?:which|whom|them|these|those)"
)
_PARTS = r"from|by|in|on|per|of(?!\s+what\b)|to|into|out|over|under|until|towards?|against|around|among|about|between"
"""Prepositions with which a number may go on: ``3 out of 4``."""
_PRONOUNS = "who|whom|that|whose|which|he|she|it|they|we|you|i"
_VERBS = "is|are|was|were|has|have|had|do|does|did|can|will|must"
_CIRCUMSTANCE = re.compile(rf"(?:{_CIRCUMSTANCES})\b", re.IGNORECASE)
_PHRASE = re.compile(rf"(?:{_CIRCUMSTANCES}|{_PARTS}|an?\s+(?!half|third|quarter|dozen|few|couple))\b", re.IGNORECASE)
_IN_OTHER_NUMBERS = re.compile(
    r"(?:in\s+)?(?:base|mod|modulo)\b|per\s+(?:cent|hundred|thousand|mil)|(?:together|along)\s+with\b", re.IGNORECASE
)
_CONTINUED = re.compile(
    r"(?:and(?!\s+(?:an?|one|some|half|twice|as|more|others|so on)\b)|so|then|thus|hence|therefore|which)\b",
    re.IGNORECASE,
)
_NOT_DONE = re.compile(
    r"(?:^|[,;]\s*)(?:but|however|yet|though|except)\b|\b(?:we|you|it|this|which|one)\s+(?:must|needs?|have to"
    r"|has to|should)\b",
    re.I,
)
"""What goes on with a number that is not the last one: ", and we must square it"."""
_DEFINITE = re.compile(
    rf"(?:is|are|was|were)\s+{_SURELY}(?:the|our|my|what|all)\b|will do\b|(?:es|est|ist|è|é) (?:la|el|le|die|der"
    rf"|das|o|a|il)\b",
    re.IGNORECASE,
)
"""What says of an expression before it that it is what is looked for."""
_FUNCTION_WORD = (
    rf"(?:{_CIRCUMSTANCES}|{_PARTS}|{_PRONOUNS}|{_VERBS}|and|or|nor|but|yet|than|as|since|because|if|unless|whether"
    rf"|though"
    r"|although|not|the|an?|this|these|those|there|too|also|rather|instead|unlike|so|then|thus|hence|therefore|cannot"
    r"|\w+n['’]t)\b"
)
_NOUN = re.compile(rf"(?:(?!{_FUNCTION_WORD})[^\W\d_]+(?:['’-]\w+)*(?:\s+|(?=\W)|$))*", re.IGNORECASE)
"""Words behind a number up to the first that belongs to the sentence: what is counted, and verbs."""
_COMPARATIVE = re.compile(r"(?i:more|less|fewer|short|next|plus|minus|als|que|che|чем)|(?![A-ZÄÖÜ])[^\W\d_]+er")
_NO_COMPARATIVE = frozenset(("together", "altogether", "later", "order", "however", "ever", "never"))
_NEEDED = re.compile(
    r"\b(?:needs?|needed|requires?|required|must)(?:\s+to)?(?:\s+\w+)?$|\b(?:have|has|had) to \w+$", re.IGNORECASE
)
_TIMES = re.compile(r"times\s+(?:as|the|his|her|its|their|that|this|what|more|less|(?!per\b)\w+er)\b", re.IGNORECASE)
_CHANGED_IN_CHINESE = re.compile(r"[半多余餘倍约吗没沒非未错]|不(?!同)|左右|以上|以下|分之|ない")


def _leaves(behind: str, unit: str, needed: bool, opens: bool) -> bool:
    """Tells whether what follows an expression says nothing else of its value.

    Args:
        unit: the words of a unit, or of what is counted, that are a part of the expression.
        needed: the expression is what somebody needs: "5 more".
        opens: the sentence begins with the expression.
    """
    rest = behind.lstrip(" .*_)\"'”’$")
    if "?" in behind or denied("", behind):
        return False
    if needed:
        rest = re.sub(r"^(?:more|additional|extra)\b\s*(?!than)", "", rest)
    noun = _NOUN.match(rest)
    words = noun[0].split() if noun else []
    if any(word[0] >= "\u3040" for word in words):
        return not _CHANGED_IN_CHINESE.search(behind)
    if _TIMES.match(f"{unit} {rest}".strip()) or _IN_OTHER_NUMBERS.match(rest) or any(map(_changes, words)):
        return False
    return _goes_on(rest[noun.end() :] if noun else rest, " ".join(words), bool(unit or words), opens)


def _changes(word: str) -> bool:
    """Tells whether a word behind a number makes it another one, or a comparison: "halves", "older"."""
    if re.fullmatch(BOUNDS, word, re.IGNORECASE) or word.lower() in MULTIPLIERS:
        return True
    if _COMPARATIVE.fullmatch(word):
        return word.lower() not in _NO_COMPARATIVE and not is_unit(word.lower())
    return word != "left" and changes_number(word.partition("-")[0])


def _goes_on(rest: str, noun: str, counted: bool, opens: bool) -> bool:
    """Tells whether a sentence goes on behind an expression, and what is counted, without changing its value."""
    head = rest.lstrip(' *_)"”’$')
    body = head.lstrip(",;:—–(- ")
    separated = body != head
    if (
        not re.search(r"\w", body)
        or _REASON.match(body)
        or _OTHER.match(head)
        or (separated and body.startswith("for "))
    ):
        return not _DOUBTED.search(noun)
    if any(pattern.match(body) for pattern in (_FEWER, _RETRACTION, _IN_OTHER_NUMBERS)) or _NOT_DONE.search(body):
        return False
    if re.search(DOUBTS, rest, re.IGNORECASE):
        return False
    if _CONTINUED.match(body) and body.lower().startswith("and"):
        return True
    if _PHRASE.match(head):
        phrase, _, more = body.partition(", ")
        joined = re.findall(r"\band\b.*", more) + re.findall(r"\band\s+twice.*", phrase)
        of_subject = opens and re.search(rf"\b{_COPULA}\b", phrase) and not re.match(r"of\s+th\w+\b", body)
        return not (of_subject or re.search(FAULTS, more, re.IGNORECASE)) and all(map(_CONTINUED.match, joined))
    plain = not re.search(rf"{NEGATIONS}|{FAULTS}", f"{noun} {body}", re.IGNORECASE)
    if separated or _DEFINITE.match(body) or _CONTINUED.match(body):
        return plain and not re.search(ALTERNATIVES, body, re.IGNORECASE)
    if not counted or _NO_CLAUSE.match(body):
        return False
    return plain or _RELATIVE.match(body) is not None


_RETRACTION = re.compile(RETRACTIONS, re.IGNORECASE)
_NO_CLAUSE = re.compile(r"(?:or|nor|than|but|as|before|excluding|without the|he|she|it|they|we|you|i)\b", re.IGNORECASE)
_FEWER = re.compile(
    r"(?:only\s+)?(?:half|most|some|many|few|none|one|two|three|not all)\s+of\s+(?:which|whom|them|these)\b",
    re.IGNORECASE,
)
_RELATIVE = re.compile(r"(?:who|whom|that|whose|which|where)\b", re.IGNORECASE)


_PARTICIPLE = re.compile(r"(?:\w+ed|\w+ing|equality|equal)\s+(?=\w)", re.IGNORECASE)
_PART_OF = re.compile(r"(?:and\s+)?(?:[a-z]+\s+){1,3}of\s+(?:which|whom|them|these|those)\b", re.IGNORECASE)
_ABOUT = re.compile(r"(?:which is )?(?:about|approximately|approx\.?|roughly|around|nearly|almost)", re.IGNORECASE)


def _is_aside(between: str, following: str) -> bool:
    """Tells whether words behind an expression begin a circumstance or a reason, in which the following one stands."""
    rest = between.lstrip(' *_)"”’$.')
    if _EXACTLY.search(rest) or re.search(r"\beach\b", rest):
        return False
    if (
        _CONDITION.search(rest)
        or _OF_THESE.match(rest)
        or (_DEFINITE.match(rest) and not re.search(r"[,;:]|\band the\b", rest))
    ):
        return True
    if between.rstrip().endswith(" of") and _LEADS.search(between.strip()):  # for a total of
        return False
    noun = _NOUN.match(rest)
    rest = rest[noun.end() :] if noun else rest
    body = rest.lstrip(",—–(- ")
    separated = body != rest
    if (noun and re.search(r"\b(?:together|along)\s*$", noun[0])) or (
        re.search(r"[,;:]|\band\b", body) and not _OTHER.match(f"{rest} ")
    ):
        return False
    if _YEAR.fullmatch(f"{body.strip()} {following}"):
        return True
    if separated and (participle := _PARTICIPLE.match(body)):
        body = body[participle.end() :]
    return bool(
        _REASON.match(body)
        or _OTHER.fullmatch(rest.strip() + " ")
        or _CIRCUMSTANCE.match(body)
        or (noun and noun[0] and re.match(r"of\s+[^\W\d_]+\s*$", body) and not _TIMES.match(noun[0] + "the"))
        or (separated and (_PART_OF.match(body) or _ABOUT.fullmatch(body.strip())))
    )


_EXACTLY = re.compile(r"\b(?:exactly|precisely|only|if and only) (?:when|if|for)\s*$|\biff\s*$", re.IGNORECASE)
_OF_THESE = re.compile(
    r"of\s+(?:the|these|those|his|her|their)\b(?:\s*$|[^,;:]*\b(?:are|is|were|was|have)\b)", re.IGNORECASE
)
"""``12 of the numbers are multiples of 3``."""
_CONDITION = re.compile(r"\b(?:when|whenever|if|iff|where)\s*$", re.IGNORECASE)
_YEAR = re.compile(r"(?:by|in|until|since)(?: the year)? (?:1[5-9]|20)\d\d\W*", re.IGNORECASE)
_SIDE_BY_SIDE = re.compile(
    rf"[^,;:]*,?\s*\band\s+(?!so|thus|hence|therefore|then|we\b|it\b|this\b|that\b|s?he\b|they\b)[^,;:]*"
    rf"\b(?:{_COPULA}|has|have)\s*",
    re.IGNORECASE,
)
"""Between two expressions of which nothing says which one is the answer."""
_GIVEN = re.compile(r"\b(?:since|because|as|if|when|where|with|given|let)\b", re.IGNORECASE)


# --- the expression of a text -----------------------------------------------------------------------------------------

_MATHY = re.compile(
    r"(?:[\d₀-₉⁰¹²³⁴-⁹⁺⁻ⁿ'+\-−*/^=<>≤≥≠≡∈()\[\]{}|.,:;!%°$€£±×·÷√π∞∪∩′_&~\ue000-\uf8ff]|\\[a-zA-Z]+|\\."
    r"|(?<![^\W\d_])[^\W\d_\u3040-\u9fff](?!(?![₀-₉⁰¹²³⁴-⁹ⁿ])[^\W\d_])"
    r"|sqrt|sin|cos|tan|log|ln|exp|pi|infinity|frac)+"
)
_NOT_MATHS = {
    "a",
    "A",
    "I",
    "-",
    ".",
    ",",
    ":",
    "–",
    "—",
    "è",
    "é",
    "à",
    "i.e.",
    "i.e.,",
    "e.g.",
    "e.g.,",
}
_JOINTS = ("and", "or", "-", "–", "−", ":")
_SENTENCE_OF_SIGNS = re.compile(r"[\u3040-\u9fff]{2,}\s*-?\d")
"""A Chinese or Japanese sentence with a number behind its words."""
_FEW_WORDS = re.compile(r"[*_\s]*[^\W\d_]{1,20}(?:\s[^\W\d_]{1,20}){0,2}[*_.\s]*")
"""A whole response that is no sentence: "Yes"."""


class _Text:
    """A text whose last statement is looked for."""

    def __init__(self, text: str, with_nouns: bool = False) -> None:
        self._formulas, self._with_nouns = _Formulas(), with_nouns
        self.plain = self._formulas.hide(_PROVED.sub("", text[-MAX_SEARCHED_CHARS:]))
        self.plain = re.sub(r"．(?!\d)", ". ", self.plain).translate(_FULL_WIDTH)
        for pattern, replacement in _CLEANED:
            self.plain = pattern.sub(replacement, self.plain)
        self.plain = self.plain.strip()

    def shown(self) -> str:
        return self._formulas.show(self.plain)

    def behind_cue(self) -> str | None:
        """What "the answer is" says; where a later sentence takes it back, what that one says."""
        cues = list(_CUE.finditer(self.plain))
        if not cues:
            return None
        whole = self._formulas.show(self.plain[cues[-1].start() :])
        before, rest = self.plain[: cues[-1].start()], self.plain[cues[-1].end() :].lstrip()
        said, *later = _sentences(rest) or [""]
        if any(re.match(RETRACTIONS, sentence, re.IGNORECASE) or TAKEN_BACK.search(sentence) for sentence in later):
            return self.stated(later) or whole
        lead = "" if before.endswith("\n") else (_sentences(before + "|") or [""])[-1]
        clause = _CLAUSE.split(lead.rstrip("|"))[-1]
        hypothetical = _COUNTERFACTUAL.search(f"{lead} {cues[-1][0]}") or _INDEFINITE.match(f"{clause} {cues[-1][0]}")
        if _DOUBTED.search(clause) or hypothetical or said.endswith("?"):
            return whole
        said = said.rstrip(".").strip("*_ ")
        if re.match(NEGATIONS, said, re.IGNORECASE) and not _BUT.search(said):
            return self.stated(later) or whole
        choice = re.match(r"(?:option|choice)?\s*(\(?[A-J]\)?)(?![\w'’])(?:[.:,]|$|\s+(?=because|since|as\b))", said)
        if choice:
            return choice[1]
        found = self._expression(said, "=") if _PROSE.search(said) or _SENTENCE_OF_SIGNS.match(said) else None
        return found or self._formulas.show(said) or None

    def stated(self, sentences: list[str] | None = None) -> str | None:
        """The expression of the last sentence that has one; the sentence, where it states none."""
        sentences = _sentences(self.plain) if sentences is None else sentences
        for named in (False, True):
            for sentence in reversed(sentences):
                found = _without_value(sentence) or self._expression(sentence, "", named)
                if found is not None:
                    return found
                if re.match(RETRACTIONS, sentence, re.IGNORECASE) or TAKEN_BACK.search(sentence):
                    return None
        return None

    def has_formula(self) -> bool:
        return re.search(_FORMULA, self.plain) is not None

    def _expression(self, sentence: str, lead: str, named: bool = False) -> str | None:
        """The expression that a sentence states; the sentence where it denies or doubts it, ``None`` without any.

        Args:
            lead: what stands before the sentence.
            named: letters alone are an expression.
        """
        words = [word.strip("*_`\"'“”") or word for word in _ASIDE.sub(_kept_aside, sentence).split()]
        runs = [run for run in _runs(words) if self._formulas.is_substance(" ".join(words[slice(*run)]), named)]
        if not runs:
            return None
        ends = [_with_unit(words, *run)[1] for run in runs]
        last = len(runs) - 1
        while last > 0 and _is_aside(_behind(words, ends[last - 1], runs[last][0]), words[runs[last][0]]):
            last -= 1
        start, end = runs[last]
        run, after = _with_unit(words, start, end)
        before = " ".join([lead, *words[:start], *(["="] if words[start] == "=" else [])])
        unit = " ".join(words[end:after]) or ("of them" if _PARTITIVE.fullmatch(before) else "")
        behind = _behind(words, after, len(words))
        if _CHANCE.match(behind):
            before = re.sub(r"\ban?\s*$", "", before)
        if re.search(r"\bor\b", run):
            before = re.sub(r"\beither\s*$", "", before)
        beside = (
            last > 0 and _SIDE_BY_SIDE.fullmatch(_behind(words, ends[last - 1], start)) and not _GIVEN.search(before)
        )
        needed = _NEEDED.search(before.rstrip(" $")) is not None
        counted = unit or _COUNTED.match(behind) or re.search("[=$€£]", self._formulas.show(run))
        stated = leads_to(before) and (counted or _states_number(before))
        if beside or not (stated and _leaves(behind, unit, needed, not before)):
            return _last_words(sentence) or _as_text(self._formulas.show(sentence))
        run = _EQUAL_TO_UNKNOWN.sub("", run) if _is_rest(run) else run
        noun = _NOUN.match(" ".join(words[after:])) if self._with_nouns and after == end else None
        run = f"{run} {noun[0]}".strip(" .") if noun else run
        run = self._formulas.last_named(run)
        return self._formulas.show(run if "\\" in run else re.sub(r"\^(-?\d{2,})", r"^{\1}", run))


_REJECTED = re.compile(
    rf"(?:we\s+)?(?:reject|discard|exclud|ignor|not|since|because|as)\w*\b.*(?:\d|{_FORMULA})", re.IGNORECASE
)


def _as_text(sentence: str) -> str:
    """A sentence that states nothing, so that it is not read as an equation: "Suppose that n = 15"."""
    return f"{sentence} ?" if re.search(r"[=≈]|\\approx", sentence) else sentence


def _kept_aside(aside: re.Match[str]) -> str:
    """Words in brackets, if they doubt what stands before them."""
    if _REJECTED.match(aside[1]):
        return ""
    return (
        aside[0]
        if re.match(RETRACTIONS, aside[1], re.IGNORECASE) or _DOUBTED.search(aside[1]) or _CHANGED.search(aside[1])
        else ""
    )


_SUBORDINATE = re.compile(r"as|since|because|for|when|if|with|at|where|given|letting|setting", re.IGNORECASE)
_PARTITIVE = re.compile(r"\W*(?:out\s+)?of\b.*,\s*", re.IGNORECASE)
"""``Of these, 12 are red``."""
_COUNTED = re.compile(rf"\s*(?:(?!{_FUNCTION_WORD})[^\W\d_]|of\b)", re.IGNORECASE)
_CHANCE = re.compile(r"\s*(?:chance|probability|increase|decrease|reduction|discount|profit|loss)\b", re.IGNORECASE)
"""What "a" may stand before a number for: "a 25% increase"."""
_EQUAL_TO_UNKNOWN = re.compile(r"^.*(?<![<>≠≤≥!])=\s*")


def _is_rest(run: str) -> bool:
    """Tells whether an equation begins within something: ``/ 2 h = 75``, ``8) = 24``."""
    return run.count("=") > 0 and (run[0] in "=/*+×÷·^)" or run.count("(") != run.count(")"))


def _runs(words: list[str]) -> list[tuple[int, int]]:
    """Where words are all signs, numbers, formulas and single letters."""
    runs, end = [], 0
    while end < len(words):
        start = end
        while end < len(words) and (_is_mathy(words[end]) or (end > start and _joins(words, end))):
            end += 1
            if words[end - 1][-1:] in ".;:!?" and words[end - 1] not in _JOINTS and not _joins(words, end):
                break
            if words[end - 1][-1:] == "," and start > 0 and _SUBORDINATE.fullmatch(words[start - 1]):
                break
        if end > start:
            runs.append((start, end))
        end = max(end, start + 1)
    return runs


def _behind(words: list[str], begin: int, end: int) -> str:
    """Words behind an expression, with the punctuation at its end."""
    point = words[begin - 1][-1:] if words[begin - 1][-1:] in ".!?,;:" else ""
    return " ".join([point, *words[begin:end]])


def _is_mathy(word: str) -> bool:
    return bool(_MATHY.fullmatch(word)) and word not in _NOT_MATHS


def _joins(words: list[str], index: int) -> bool:
    """``3 or 4``, ``3 - 4``: a conjunction or a sign between two numbers."""
    if not 0 < index < len(words) - 1 or words[index] not in _JOINTS:
        return False
    return _is_mathy(words[index - 1]) and _is_mathy(words[index + 1])


def _with_unit(words: list[str], start: int, end: int) -> tuple[str, int]:
    """A run of words with the unit behind it, and where that ends."""
    run = words[start:end]
    closed = run[-1][-1:] in ".,;:!?"
    for count in range(0 if closed else min(_MOST_UNIT_WORDS, len(words) - end), 0, -1):
        unit = [word.replace("²", "^2").replace("³", "^3") for word in words[end : end + count]]
        unit[-1] = unit[-1].rstrip(".,;:!?")
        known = canonical_unit(" ".join(unit)) is not None and (len(unit) > 1 or _names_unit(unit[0]))
        if (known and unit[-1] not in _NO_UNIT_END and unit[0] != "in" and not {"a", "an"} & {*unit}) or " ".join(
            unit
        ) in (*MULTIPLIERS, "percent", "%"):
            run = [*run, *unit]
            break
    after = start + len(run)
    text = " ".join(run)
    text = text if text.endswith("!") and re.search(r"[\w)]!$", text) else text.rstrip(".,;:!?")
    return _UNIT_LETTER.sub(r"\1 \\text{\2}", text), after


def _names_unit(word: str) -> bool:
    return is_unit(word) or (re.search(r"[/^]", word[1:]) is not None and canonical_unit(word) is not None)


_MOST_UNIT_WORDS = 4
_NO_UNIT_END = ("in", "of", "each")
_UNIT_LETTER = re.compile(rf"(?<!\S)(\$?[\d.,]*\d|{_FORMULA}) ([mgshL])$")
"""``5 m`` in a sentence is a length."""


def last_expression(text: str, with_nouns: bool = False) -> str | None:
    """The answer in prose: behind "the answer is", else what the last sentence with an expression states.

    Args:
        with_nouns: unknown words behind the number are a part of it, since they may be a unit: "5 parsecs".
    """
    said = _Text(text, with_nouns)
    found = said.behind_cue() or said.stated() or _last_choice(said.plain)
    return found or (said.plain if _FEW_WORDS.fullmatch(said.plain) else _last_words(said.shown()))


def said_in(marked: str) -> str:
    """The expression in a sentence that is marked as the answer; where none says so, all of it is the answer."""
    whole = re.fullmatch(r"\\text\s*\{([^{}]*)\}", marked)
    marked = _CUED.sub("", whole[1] if whole and _CUED.match(whole[1]) else marked)
    if not _PROSE.search(_TEXT.sub("", marked)):
        return marked
    said = _Text(marked)
    stated = _STATES.search(re.sub(_FORMULA, "", said.plain)) and said.has_formula()
    return said.behind_cue() or (said.stated() if stated else None) or marked


def corrected(behind: str) -> str | None:
    """What the text behind a marked answer says instead: "I made an error. The correct answer is 40"."""
    return _Text(behind).behind_cue() or behind if CORRECTED.search(behind) else None


_STATES = re.compile(r"\b(?:is|are|was|were|be|equals?|gives?|has|have|get)\b|[=:\u3040-\u9fff]|^\W*$", re.IGNORECASE)

# --- answers in words -------------------------------------------------------------------------------------------------

_WITHOUT_VALUE = re.compile(
    r"\b(?:has|have|there\s+(?:is|are|exists?)|is|are|does)\s+(?P<said>[^\d,;]+?)[\s.]*$", re.IGNORECASE
)


def _without_value(sentence: str) -> str | None:
    """What says that there is no value, or no single one: "the equation has no real solution"."""
    match = _WITHOUT_VALUE.search(sentence)
    if match is None or _DOUBTED.search(_CLAUSE.split(sentence[: match.start()])[-1]):
        return None
    said = match["said"].removesuffix(" to the equation")
    return said if meaning(said) is not None else None


def _last_words(text: str) -> str | None:
    """The few words that the last sentence says something is: "it will be a Tuesday"."""
    if said := re.fullmatch(r"(yes|no),\s+(?!wait|but|maybe)[^.,:;?]*[.!]?", text.strip(), re.IGNORECASE):
        return said[1]
    match = _NAMES.search(text)
    return match[1] if match and not _DOUBTED.search(_CLAUSE.split(text[: match.end()])[-1]) else None


_NAMES = re.compile(
    r"\b(?:(?:is|was|are|were|(?:will|must|should) be)\s+(?:an?\s+|the\s+|on\s+)?|(?:on|of)\s+an?\s+"
    r"|(?-i:on\s+(?=[A-Z])))"
    r"((?:[^\W\d_]{1,20}\s){0,2}[^\W\d_]{1,20})[\s.]*$"
)


def _last_choice(text: str) -> str | None:
    """The letter that is the last line, or that "the correct option is" names."""
    match = _CHOICE.search(text)
    return match[1] if match and not _DOUBTED.search(_CLAUSE.split(text[: match.start(1)])[-1]) else None


_CHOICE = re.compile(
    r"(?:^|\n|\b(?:option|choice)\s+(?:is|:)\s*|:\s*)(?:option\s+|choice\s+)?[*_\s]*(\(?[A-J]\)?)[*_\s.]*$",
    re.IGNORECASE,
)

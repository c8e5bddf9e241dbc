"""Answers in sentences: the expression that a text states as its answer.

An expression counts where the sentence around it is understood: a word that states ("is", "=", "gives", "has") or a
colon before it, and nothing in its clause that denies it, doubts it or changes it ("not", "can't", "if", "half of").
Otherwise the whole sentence is the answer, which equals no number.
"""

from __future__ import annotations

import re

from roll.rewards.maths.units import MULTIPLIERS, canonical_unit, changes_number, is_unit

MAX_SEARCHED_CHARS = 4000
"""Only this much of a response's end is searched for an expression that nothing marks as the answer."""

_WORD = r"(?<![\\\w{])[^\W\d_]{2,}"
_PROSE = re.compile(rf"\$[^$]*[^\s$][^$]*\$|\\[(\[]|\\boxed|{_WORD}[,:]?\s+(?:{_WORD}|[-−(]?\d|\(?[A-J]\b)")
"""Two words, a word before a number, or LaTeX that is marked as such: the expression in it must be found."""
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{[^{}]*\}")
_CUE = re.compile(
    r"(?:\banswer\b[\s*_]{0,5}(?:(?:is|are|should be|must be|would be|equals)\b|:|=)"
    r"|\b(?:antwort|lösung|ergebnis)\b\s*(?:(?:ist|lautet|beträgt)\b|:)"
    r"|\b(?:réponse|résultat|respuesta|resultado|resposta|risposta)\b\s*(?:(?:finale|final)\s+)?(?:(?:est|es)\b|é\b|è\b|:)"
    r"|\bответ\b\s*[:—–-]|\b(?:antwoord|svar|odpowiedź|cevap|đáp án)\b\s*:"
    r"|(?<!不)选(?:择)?\s*[:：]?|答案?\s*(?:是|为|為|等于|[:：=])|答え\s*[はを:：]|(?:정답|답)\s*[은:：])[\s*_:：]{0,5}",
    re.IGNORECASE,
)
_CUED = re.compile(
    rf"^(?:\\text\s*\{{\s*|(?:so|thus|hence|therefore),?\s*|the\s+|final\s+)*{_CUE.pattern}\s*\}}?", re.I
)
"""A whole answer that begins with "the answer is"."""
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)(?![^$]{0,200}\$(?:\s|[.,]|$))|[。！？]|\n\s*\n")
_MATHS = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\n]+?)(?<!\\)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}(.+?)\\end\{(?:align|equation|gather)\*?\}",
    re.DOTALL,
)
"""A dollar sign before a digit closes nothing: ``$400 + $60``."""
_ROWS = re.compile(r"\\begin\{(?:aligned|split|gathered)\}(.+)\\end\{(?:aligned|split|gathered)\}|(.+)", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*")
_MATHY = re.compile(
    r"(?:[\d₀-₉⁰¹²³⁴-⁹⁺⁻ⁿ'+\-−*/^=<>≤≥≠≡∈()\[\]{}|.,:;!%°$€£±×·÷√π∞∪∩′_&~]|\\[a-zA-Z]+|\\.|(?<![^\W\d_])[^\W\d_](?!(?![₀-₉⁰¹²³⁴-⁹ⁿ])[^\W\d_])"
    r"|sqrt|sin|cos|tan|log|ln|exp|pi|infinity|frac)+"
)
_FEW_WORDS = re.compile(r"[*_\s]*[^\W\d_]{1,20}(?:\s[^\W\d_]{1,20}){0,2}[*_.\s]*")
"""A whole response that is no sentence: "Yes"."""
_SUBSTANCE = re.compile(r"\d|\\(?!f?boxed\b|fbox\b)[a-zA-Z]|π|∞|√")
_NOT_MATHS = {"a", "A", "I", "-", ".", ",", ":", "–", "è", "é", "à", "i.e.", "i.e.,", "e.g.", "e.g.,"}

# --- what a clause says of its expression -----------------------------------------------------------------------------

_CLAUSE = re.compile(r"[.!?;:,—]\s|\n|\b(?:so|therefore|thus|hence|then)\b", re.IGNORECASE)
_LEADS = re.compile(
    r"\b(?:(?:total|sum|product|area|perimeter|volume|length|value|cost|price|amount|result|answer|probability|average"
    r"|distance|speed|number|score|profit|radius|slope) of|exactly|only|precisely|left with|Zahl|Wert|Anzahl"
    r"|therefore|thus|so|hence|then|answer"
    r"|result|value|total|option|choice)$|[有是为為得到共要需了剩故则即以此はがて]$|等于$",
    re.IGNORECASE,
)
"""What states an expression behind it though the next rule says otherwise."""
_NO_LEAD = re.compile(
    r"(?:\b(?i:of|than|by|with|without|from|per|modulo?|versus|vs|plus|minus|over|under|above|below|between|among|and|nor"
    r"|but|when|where|while|because|since|let|suppose|assum\w+|consider\w*|try\w*|tried|take|say|example|like|as"
    r"|least|most|out|off|up(?: to)?|\d+ to"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|page|chapter|theorem|lemma|corollary|proposition|equation|question|problem|step"
    r"|section|figure|table|case|part|line|exercise|item|note|rule|property|method|attempt|version|level|grade|divid\w+"
    r"|exceed\w*|another|other|next|previous|last|first|second|third|all|every|each|any|some|base|power|degree|for|until"
    r"|before|after|against|nearly|almost|approximately|about|roughly|around|ca|some|mindestens|höchstens|etwa"
    r"|ungefähr|environ|casi|quasi|the|these|those|this|that|it|an?|als|que|de|von|par|um|bis|di|che|чем|от|на)"
    r"|\b[A-Z]\w*|[\u3040-\u9fff])$"
)
"""Words between which and the expression nothing is stated: prepositions, names of numbered things, capitals. Any other
word is taken for a verb."""
_UNCERTAIN = re.compile(
    r"\b(?:not|never|neither|nor|no|none|nothing|nobody|cannot|without|except|unless|hardly|barely|wrong|wrongly"
    r"|incorrect|incorrectly|false|falsely|impossible|invalid|mistaken|mistakenly|reject\w*|exclud\w*|avoid\w*|doubt\w*"
    r"|den(?:y|ies|ied)|if|whether|maybe|perhaps|might|(?-i:may)|could|fail(?:s|ed)?|wants?|wanted|likes? to"
    r"|hop(?:es?|ed)|wish\w*"
    r"|refus\w*|nearly|almost|close|near|so far|for now|possibly|probably|guess\w*|or|either|between|twice"
    r"|half|double|times|minus|negative)\b|n['’]t\b|\b(?:nicht|kein\w*|ne|pas|не|нет|nunca|nie|não|non|jamais|oder|ou|или|quizás|weniger|mehr|menos|más|moins|меньше|больше)\b|[不没沒非未或]|可能|大约|至少|最多|超过|除了",
    re.IGNORECASE,
)
_STATED_BEHIND = re.compile(
    r"\s*(?:is|as)\s+(?:the|our|my)\s+(?:\w+\s+)?(?:answer|result|solution|value)\b[\s*.]*$", re.I
)
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


_TAKEN_BACK = re.compile(
    r"\b(?:that|this|it)(?:['’]s| is| was)\s+(?:\w+\s+)?(?:false|wrong|incorrect|a lie|not (?:right|correct|true|it|so"
    r"|the answer))\b|\b(?:that|this|it) isn['’]t (?:right|correct|true|it|the answer)\b",
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
    return bool(_GOVERNED.search(clause) or _RETRACTED.match(behind) or _TAKEN_BACK.search(behind))


def corrected(behind: str) -> str | None:
    """What the text behind a marked answer says instead: "I made an error. The correct answer is 40"."""
    return _behind_cue(behind) or behind if _CORRECTED.search(behind) else None


_CORRECTED = re.compile(
    r"\b(?:oops|correction|scratch that|on second thought|(?:made|is|was|contains) (?:an?|some) (?:error|mistake)"
    r"|(?:correct|right|actual|real|true) (?:answer|value|result) (?:is|was|should)|hmm+)\b|更正|修正|抱歉",
    re.IGNORECASE,
)


def is_part(before: str, behind: str) -> bool:
    """Tells whether what stands between is a part of something longer: ``2 \\cdot``, ``^2``, "or 31", "million"."""
    before = re.sub(r"</?\w+>", ".", before[-60:])
    return bool(_PART_OF_TERM.search(before) or _GOES_ON.match(behind[:60]))


def _stated(before: str, behind: str, measured: bool = False) -> bool:
    """Tells whether the words around an expression that nothing marks state it as the value of something."""
    lead = before.rstrip(" *_$(\"“'")
    clause = _CLAUSE.split(lead)[-1] if not lead.endswith((",", ";")) else re.split(r"[.!?]\s|\n", lead)[-1]
    rest = re.sub(r"(?:です|である|だ|となる)(?=[\s。.]*$)", "", (_SENTENCE_END.split(behind, maxsplit=1) or [""])[0])
    if _UNCERTAIN.search(clause) or behind.lstrip("*_$ ").startswith("?") or denied(lead, behind):
        return False
    words = rest.strip(" *_$").split()
    if _NO_LEAD.search(clause.rstrip()) and not _LEADS.search(clause.rstrip()):
        return False
    if _EXAMPLE.search(re.split(r"[.!?]\s|\n", lead)[-1]):
        return False
    if words and _STATED_BEHIND.match(rest):
        return True
    if (
        words
        and not _OF_ALL.match(rest)
        and not _NEW_CLAUSE.match(rest)
        and (not clause.strip() or words[0][0] >= "\u3040")
    ):
        if measured and _PHRASE_BEHIND.match(" ".join(words)):
            return not _UNCERTAIN.search(rest)
        return len(words) == 1 and canonical_unit(words[0].rstrip(",.;。")) is not None
    if _NEW_CLAUSE.match(rest):
        return True
    said = " ".join(words)
    if _NEEDED.search(clause.rstrip()):
        said = re.sub(r"^(?:more|additional|extra)\b\s*(?!than)", "", said)
        words = said.split()
    changed = _COMPARED.match(said) if measured else words and changes_number(words[0]) and not _WITHIN.match(said)
    return not (changed or _UNCERTAIN.search(rest))


_COMPARED = re.compile(
    r"(?:(?:less|more|fewer|short|or|below|above|under|than|plus|minus|times|to\s+\d)\b|over\s+\d|\w+er\s+than\b"
    r"|as\s+\w+\s+as\b)",
    re.IGNORECASE,
)
_WITHIN = re.compile(
    r"(?:over|in|from)\s+(?:the|a|an|all|these|those|his|her|their)\b|per\s+(?!cent|hundred|thousand|mil)[a-z]",
    re.IGNORECASE,
)
_PHRASE_BEHIND = re.compile(r"(?:in|on|at|for|during|sold|each|every)\b(?!\s+\d)", re.IGNORECASE)
_OF_ALL = re.compile(r"\s*of\s+(?:the|all|his|her|their|its)\b(?![^\n]*\d)", re.IGNORECASE)
_NEEDED = re.compile(r"\b(?:needs?|needed|requires?|required)$", re.IGNORECASE)
_CIRCUMSTANCE = re.compile(
    r"\b(?:(?:over|during|after|within|of|among)\s+(?:the|these|those|all|his|her|their|its)(?:\s+[a-z]+)?|when"
    r"|(?:achieved|attained|reached|occurs?|occurring|equality)\s+(?:at|for|if|iff|by))[\s$(\\]*$",
    re.IGNORECASE,
)
"""Before an expression that says where another one holds: ``9 when x = 3``."""
_EXAMPLE = re.compile(
    r"\b(?:for (?:example|instance)|e\.g\.|such as|would have)(?![^\W_])|zum Beispiel|par exemple|例如|比如", re.I
)
_NEW_CLAUSE = re.compile(
    r"[\s$*_)]*(?:,\s+which\s+(?:equals|is)\s+[\s$\d.%]+$|[,;]\s+(?:and|so|which|as|since|because|hence|therefore|thus)\b(?![^\n]*(?:\d|\b(?:but|however|yet|though)\b)))",
    re.IGNORECASE,
)
"""What follows an expression without saying anything of it: ", and we are done"."""


# --- where the expression is ------------------------------------------------------------------------------------------


def said_in(marked: str) -> str:
    """The expression in a sentence that is marked as the answer; where none says so, all of it is the answer."""
    whole = re.fullmatch(r"\\text\s*\{([^{}]*)\}", marked)
    marked = _CUED.sub("", whole[1] if whole and _CUED.match(whole[1]) else marked)
    if _PROSE.search(_TEXT.sub("", marked)):
        stated = _STATES.search(_MATHS.sub("", marked))
        return _behind_cue(marked) or (_last_marked(marked) if stated else None) or marked
    return marked


_STATES = re.compile(r"\b(?:is|are|was|were|be|equals?|gives?|has|have|get)\b|[=:\u3040-\u9fff]|^\W*$", re.IGNORECASE)


def last_expression(text: str) -> str | None:
    """The answer in prose: behind "the answer is", else in the last LaTeX, else the last run of mathematical signs."""
    tail = re.sub(r"．(?!\d)", "。", _PROVED.sub("", text[-MAX_SEARCHED_CHARS:]))
    tail = _ASIDE.sub("", _BOLD.sub(r"\1", tail)).strip()
    found = _behind_cue(tail) or _last_marked(tail) or _last_run(tail) or _last_choice(tail)
    return found or (tail if _FEW_WORDS.fullmatch(tail) else _last_words(tail))


_ASIDE = re.compile(r"\s\((?!\s*mod|[^()]*\b(?:not|or|maybe|wrong|if)\b)[^()$\\]*[a-z]{3,}[^()$\\]*\)(?=[.\s]*$)")
"""The last words in brackets: "(8 red and 6 blue)"."""
_BOLD = re.compile(r"(?:(?m:^)>\s+)?(?<![\w*])\*\*(?=[^\s*])([^*\n]+)\*\*(?![\w*])")
_PROVED = re.compile(
    r"(?:\s*(?:\$\s*\\(?:blacksquare|square|Box|qed)\s*\$|\\(?:blacksquare|square|Box|qed)\b|[∎■□]|Q\.?E\.?D\b\.?"
    r"|(?<=[.!]\s)(?:Done|We are done)[.!]))+\s*$"
)


def _last_words(text: str) -> str | None:
    """The few words that the last sentence says something is: "it will be a Tuesday"."""
    if said := re.fullmatch(r"(yes|no),\s+(?!wait|but|maybe)[^.,:;?]*[.!]?", text.strip(), re.IGNORECASE):
        return said[1]
    match = _NAMES.search(text)
    return match[1] if match and not _UNCERTAIN.search(_CLAUSE.split(text[: match.end()])[-1]) else None


_NAMES = re.compile(
    r"\b(?:(?:is|was|are|were|(?:will|must|should) be)\s+(?:an?\s+|the\s+|on\s+)?|(?:on|of)\s+an?\s+)"
    r"((?:[^\W\d_]{1,20}\s){0,2}[^\W\d_]{1,20})[\s.]*$"
)


def _last_choice(text: str) -> str | None:
    """The letter that is the last line, or that "the correct option is" names."""
    match = _CHOICE.search(text)
    return match[1] if match and not _UNCERTAIN.search(_CLAUSE.split(text[: match.start(1)])[-1]) else None


_CHOICE = re.compile(
    r"(?:^|\n|\b(?:option|choice)\s+(?:is|:)\s*|:\s*)(?:option\s+|choice\s+)?[*_\s]*(\(?[A-J]\)?)[*_\s.]*$",
    re.IGNORECASE,
)


def _behind_cue(text: str) -> str | None:
    """The expression that a few words behind "the answer is" hold."""
    cues = list(_CUE.finditer(text))
    if not cues:
        return None
    before, rest = text[: cues[-1].start()], text[cues[-1].end() :]
    end = _SENTENCE_END.search(rest)
    said = (rest[: end.start()] if end else rest).strip().strip("*_").strip()
    said = re.sub(r"(?:です|である|だ|입니다|이다)$", "", said).strip()
    if _UNCERTAIN.search(_CLAUSE.split(before)[-1]) or (
        end and (_RETRACTED.match(rest[end.end() :]) or _TAKEN_BACK.search(rest[end.end() :][:200]))
    ):
        return text[cues[-1].start() :]
    marked = _last_marked(said)
    if marked is not None:
        return marked
    choice = re.match(r"(?:option|choice)?\s*(\(?[A-J]\)?)(?![\w'’])(?:[.:,]|$|\s+(?=because|since|as\b))", said)
    if choice:
        return choice[1]
    said = _IN_TEXT.sub(r"\1", said)
    if not _PROSE.search(said):
        return (_last_run(said) if _SENTENCE_OF_SIGNS.match(said) else said) or None
    return _last_run(said, lead="=")


_IN_TEXT = re.compile(r"^\}\s*([^{}$]+)\$*$")
"""What is left of ``$\\text{The answer is } 8$``."""
_SENTENCE_OF_SIGNS = re.compile(r"[\u3040-\u9fff]{2,}\s*-?\d")
"""A Chinese or Japanese sentence with a number behind its words."""


def _last_row(rows: str) -> str:
    """Of equal expressions below each other the last one; all, where each row says something of its own."""
    match = _ROWS.fullmatch(rows.strip())
    parts = [row.strip() for row in re.split(r"\\\\(?:\[\w.]+\])?", (match[1] or match[2]) if match else rows)]
    parts = [row for row in parts if row]
    lefts = [row.partition("=")[0].strip(" &") for row in parts if "=" in row]
    named = {left for left in lefts if left.isalpha()} or {left for left in lefts if left}
    steps = len(lefts) == len(parts) > 0 and len(named) == 1 and lefts[-1] in named | {""}
    return parts[-1].replace("&", " ") if steps or len(parts) == 1 else rows


def _last_marked(text: str) -> str | None:
    """The last ``$…$``, with those before it that a comma or a conjunction joins to it."""
    found: list[str] = []
    following: int | None = None
    behind, joint = "", ", "
    for match in reversed(list(_MATHS.finditer(text))):
        if following is not None and not _BETWEEN.fullmatch(text[match.end() : following]):
            break
        joint = r" \text{ or } " if following is not None and "or" in text[match.end() : following] else joint
        if following is None and _CIRCUMSTANCE.search(text[: match.start()]) and "$" in text[: match.start()]:
            continue
        content = _last_row(next(group for group in match.groups() if group is not None).strip())
        if not content or re.search(rf"{_WORD}\s+{_WORD}", content):
            break
        behind = behind if found else text[match.end() :]
        found.append(content)
        following = match.start()
    if following is not None and not _stated(text[:following], behind):
        return text
    return joint.join(reversed(found)) or None


def _last_run(text: str, lead: str = "") -> str | None:
    """The last words that are all signs, numbers, single letters; with a known unit behind them.

    Args:
        lead: what stands before the text.
    """
    for line in reversed(re.sub(_SCRIPT_EDGE, " ", text).splitlines()):
        words = [word.strip("*_`\"'“”") or word for word in line.split()]
        end = len(words)
        while end > 0:
            if not _is_mathy(words[end - 1]):
                end -= 1
                continue
            start = end - 1
            while start > 0 and (_is_mathy(words[start - 1]) or _joins(words, start - 1)):
                if words[start - 1][-1:] in ".;:!?" and not _joins(words, start - 1):
                    break
                start -= 1
            run, last = _with_unit(words, start, end)
            if _SUBSTANCE.search(run):
                if (
                    start
                    and _CIRCUMSTANCE.search(" ".join(words[:start]))
                    and re.search(r"\d[^.]*$", " ".join(words[:start]))
                ):
                    end = start
                    continue
                point = words[last - 1][-1:] if words[last - 1][-1:] in ".!?,;:" else ""
                stated = _stated(
                    " ".join([lead, *words[:start], *(["="] if words[start] == "=" else [])]),
                    " ".join([point, *words[last:]]),
                    measured=last > end,
                )
                run = run.removeprefix("= ") if run.count("=") > 1 else run
                run = run if "\\" in run else re.sub(r"\^(-?\d{2,})", r"^{\1}", run)
                return run if stated else _last_words(line) or line
            end = start
    return None


_SCRIPT_EDGE = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])(?=[-−\d$\\(])|(?<=[\d)%])(?=[\u3000-\u9fff])")
"""Between Chinese signs and numbers, where no space is written."""


def _is_mathy(word: str) -> bool:
    return bool(_MATHY.fullmatch(word)) and word not in _NOT_MATHS


def _joins(words: list[str], index: int) -> bool:
    """``3 or 4``, ``3 - 4``: a conjunction or a sign between two numbers."""
    return words[index] in ("and", "or", "-", "–", "−") and index > 0 and _is_mathy(words[index - 1])


def _names_unit(word: str) -> bool:
    return is_unit(word) or (re.search(r"[/^]", word[1:]) is not None and canonical_unit(word) is not None)


def _with_unit(words: list[str], start: int, end: int) -> tuple[str, int]:
    """A run of words with the unit behind it, and where that ends."""
    run = words[start:end]
    for index, word in enumerate(words[end : end + 2], end + 1):
        bare = word.rstrip(".,;:!?").replace("²", "^2").replace("³", "^3")
        if word == "in" and index < len(words):  # no inches
            break
        if run[-1][-1:] in ".,;:!?" or not (_names_unit(bare) or bare in MULTIPLIERS or bare in ("percent", "%")):
            break
        run.append(bare)
    text = " ".join(run)
    kept = text if text.endswith("!") and re.search(r"[\w)]!$", text) else text.rstrip(".,;:!?")
    return kept, start + len(run)

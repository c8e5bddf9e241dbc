"""Units behind numbers: an allow list, one spelling for each, and what one is in another (``100 cm`` is ``1 m``).

Words that are not known here are no unit, since they may change the number: ``5 halves``, ``5 is wrong``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from fractions import Fraction

CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound", "¥": "yuan", "₹": "rupee", "₽": "rouble"}
MULTIPLIERS = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "百": 10**2, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
}  # fmt: skip

_MEASURES: dict[str, tuple[int | Fraction, str, str]] = {
    # unit: (size, dimension, other spellings)
    "mm": (Fraction(1, 1000), "m", "millimeter millimetre 毫米 мм millimètre milímetro"),
    "cm": (Fraction(1, 100), "m", "centimeter centimetre cms 厘米 公分 см сантиметр zentimeter centimètre centímetro"),
    "dm": (Fraction(1, 10), "m", "decimeter decimetre 分米 дм"),
    "m": (1, "m", "meter metre 米 м метр метра метров mètre metro"),
    "km": (1000, "m", "kilometer kilometre kms 千米 公里 км километр километра километров kilomètre kilómetro"),
    "mi": (63360, "inch", "mile"),
    "ft": (12, "inch", "foot feet"),
    "in": (1, "inch", "inch inches"),
    "yd": (36, "inch", "yard yds"),
    "mg": (Fraction(1, 1000), "g", "milligram 毫克 мг"),
    "g": (1, "g", "gram gramme gm gms 克 г грамм граммов"),
    "kg": (1000, "g", "kilogram kilogramme kgs kilo 千克 公斤 кг килограмм килограмма килограммов"),
    "t": (1000000, "g", "tonne 吨"),
    "ton": (0, "", ""),
    "lb": (16, "oz", "lbs"),
    "oz": (1, "oz", "ounce"),
    "ml": (Fraction(1, 1000), "L", "milliliter millilitre mL 毫升 мл"),
    "L": (1, "L", "l liter litre 升 л литр литра литров"),
    "gallon": (0, "", "gal"),
    "s": (1, "s", "second sec secs 秒 с сек секунд секунды sekunde sekunden segundo seconde 초"),
    "min": (60, "s", "minute mins minuto minuten 分钟 分鐘 分 мин минут минуты 분"),
    "h": (3600, "s", "hour hr hrs heure hora stunde stunden ora 小时 小時 时 時間 ч час часа часов 시간"),
    "day": (86400, "s", "jour día dia tag tage giorno 天 日 день дня дней 일"),
    "week": (604800, "s", "wk wks semaine semana woche wochen 周 星期 週 неделя недели недель"),
    "month": (1, "month", "mois mes meses monat monate 个月 月 месяц месяца месяцев"),
    "year": (12, "month", "yr yrs année año ano jahr jahre 年 год года лет 년"),
        "dollar": (0, "", "USD bucks 美元 доллар долларов"),
    "cent": (0, "", "¢ centavo"),
    "euro": (0, "", "EUR евро €"),
    "pound": (0, "", "GBP £"),
    "yuan": (0, "", "元 块 块钱 元钱 RMB CNY"),
    "rupee": (0, "", "₹ Rs INR"),
    "rouble": (0, "", "ruble руб рубль рубля рублей р"),
    "yen": (0, "", "円 JPY"),
    "won": (0, "", "원"),
    "°": (0, "", "degree deg 度 градус градуса градусов grad grado degré graus"),
    "°C": (0, "", "celsius"),
    "°F": (0, "", "fahrenheit"),
    "rad": (0, "", "radian"),
    "unit": (0, "", "单位 units"),
    "Hz": (1, "Hz", "hertz"), "kHz": (1000, "Hz", ""), "MHz": (10**6, "Hz", ""),
    "N": (1, "N", "newton"), "kN": (1000, "N", ""),
    "J": (1, "J", "joule"), "kJ": (1000, "J", "kilojoule"), "MJ": (10**6, "J", ""),
    "eV": (0, "", ""), "cal": (1, "cal", "calorie"), "kcal": (1000, "cal", "kilocalorie"),
    "mW": (Fraction(1, 1000), "W", ""), "W": (1, "W", "watt"), "kW": (1000, "W", "kilowatt"),
    "MW": (10**6, "W", "megawatt"),
    "kWh": (0, "", ""),
    "mV": (Fraction(1, 1000), "V", ""), "V": (1, "V", "volt"), "kV": (1000, "V", ""),
    "mA": (Fraction(1, 1000), "A", ""), "A": (1, "A", "ampere amp"),
    "ohm": (1, "ohm", "Ω"), "F": (0, "", "farad"), "C": (0, "", "coulomb"), "T": (0, "", "tesla"),
    "Pa": (1, "Pa", "pascal"), "kPa": (1000, "Pa", "kilopascal"), "MPa": (10**6, "Pa", ""),
    "atm": (0, "", "atmosphere"),
    "mol": (1, "mol", "mole"), "K": (0, "", "kelvin"), "acre": (0, "", ""), "hectare": (0, "", "公顷"),
    "nm": (Fraction(1, 10**9), "m", "nanometer nanometre"),
    "ms": (Fraction(1, 1000), "s", "millisecond"), "bit": (0, "", ""), "byte": (0, "", ""), "kB": (0, "", "KB"),
    "MB": (0, "", ""), "GB": (0, "", ""), "dB": (0, "", "decibel"), "M": (0, "", ""), "erg": (0, "", ""),
}  # fmt: skip
_ENGLISH = (
    "handshake game-point arrangement hug kiss kisses greeting phone-call smile wish promise vote trade swap match-up "
    "triplet quadruple quintuple divisor cofactor coprime semicircle hemisphere pebble seashell acorn brick shingle "
    "tulip daisy daisies orchid lily lilies sunflower bouquet seedling sapling vine bush bushes hedge fence gate post "
    "ferry ferries subway tram cab lap knot furlong league fathom bushel peck stone grain carat karat pixel dot frame "
    "cord thread yarn fabric cloth pleat stitch stitches patch patches quilt needle pin hook spool bolt nut washer "
    "member delegate senator juror witness witnesses suspect prisoner hostage victim survivor refugee immigrant native "
    "account acorn act actor adjective adult airport album alien almond anagram angle animal ant apartment apple "
    "apricot arc area arrangement article artist assist asymptote athlete atom auction aunt author automorphism "
    "avenue avocado award axiom baby backpack bacteria bacteriophage bacterium badge bag bagel baker ball balloon "
    "ballot banana bank banner barn barrel basket bat batch battery beach bead bean bear bed bee beer beet beetle "
    "belt bench berry bicycle bid bike bill bille binder bird birthday biscuit bishop bitstring blanket block blouse "
    "blueberry board boat bond bonus book boot bottle bowl box boy boyfriend bracelet bread breath brick bridge "
    "brooch brother brownie brush bucket bug builder building bulb bun bunch bundle burger burrito bus butterfly "
    "button buyer cabbage cabinet cable cake call calorie camel camera camp camper campfire can candidate candle "
    "candy canoe canvas captain car card carpenter carpet carrot cart carton case cashier castle cat caterpillar cell "
    "century cereal certificate chair chalk champion chapter check chef cherry chicken child children chip chocolate "
    "choice chord chore chorus chromosome cinema circle circuit circumference citizen city clam class classroom clerk "
    "click client clinic clip clique clock closet cloud clove coach coat cob coconut code codeword coffee coin color "
    "coloring colour colouring column combination comic component computer concert cone consonant contestant "
    "continent cook cookie copy corn coset costume couch country county coupon course cousin cow crab cracker "
    "cranberry crate crayon crew cricket croissant crow cube cucumber cup cupcake cupful curtain customer cycle "
    "cylinder dancer date daughter dawn decade deer delivery dentist desert desk detective diagonal diameter diamond "
    "dice dictionary die digit dime dimension dinosaur diploma discount dish divisor dock doctor dog doll dollhouse "
    "dolphin domain domino donkey donor donut door dot dragon dragonfly draw drawer drawing dress driver drum duck "
    "dumpling dwarf dye eagle earring earthquake easel edge editor egg eigenvalue eigenvector election electrician "
    "electron element elephant elf elves email ember employee engine engineer envelope episode equation eraser essay "
    "exam expression fable face factor factory family fan farm farmer father feather festival field fig figure "
    "figurine film finalist firecracker firefighter firework fish flag fleur flies flight flip flood floor flower "
    "flute folder follower forest fork fortnight fox frame freezer fridge friend frog fry function game gamer garden "
    "gardener garlic gear geese gem gene generation ghost giant gift giraffe girl girlfriend glass glove glue goal "
    "goat goose grade grandchild grandchildren grandfather grandmother grandparent grape graph grasshopper grid group "
    "guard guest guitar gum hairclip hairpin hamster handbag harbor hat hawk headband heart heartbeat heel helicopter "
    "helmet hen herb hexagon highway hike hiker hill hippo holiday home homer homomorphism hoop horse hospital host "
    "hotdog house husband hyperplane ideal idiom inequality ink inning insect inspector integer intersection investor "
    "invoice ion island isomorphism isotope item jacket janitor jar jean jello jellybean jersey job joke journey "
    "judge juice jump kangaroo kayak keg kernel kettle key keyboard kid king kite kitten kiwi knife knight knives "
    "koala label ladybug lake lamp lane lantern lap laptop lasagna latte lattice law lawyer layer leaf leaves lecture "
    "legend lego lemma lemon lemonade lesson letter lettuce level lever library life light light-year lime line lion "
    "listener lives lizard load loaf loan loaves lobster lock log lollipop loser loss lunchbox machine magazine "
    "magnet mammal man manager mango marble mark marker mask mason match matching matrices matrix mattress meal "
    "mechanic medal melon member men message mice milk milkshake millennium mirror mitten monkey monster monument "
    "moose morning mosquito moth mother motor motorcycle mountain mouse move movie muffin mug multiple museum "
    "mushroom musician myth nail napkin necklace neighbor neighborhood nephew net neutron newspaper nickel niece "
    "night node noodle notebook noun novel nugget number nurse nut object occasion ocean octagon octahedron octopus "
    "office officer olive onion option orange orbit outcome oven owl owner oyster pack package packet pad page paint "
    "painter painting pair palace palindrome pan pancake panda pant papaya paper paragraph parallelogram parameter "
    "parcel parent park parrot part participant particle partition party pass passenger passport password path "
    "patient pattern pawn payment pea peach peanut pear pearl pen penalty pencil penguin penny pentagon people pepper "
    "perimeter period permutation person pet pharmacist pharmacy phone photo photograph photon phrase piano picture "
    "pie piece pig pigeon pigment pile pillow pilot pineapple pint pirate pistachio pitcher pizza plane planet plank "
    "plant plate play player playground plug plum plumber poem poet point policeman policemen polygon polynomial "
    "polyomino pond pool popcorn port portrait position possibility post postcard poster pot potato present pretzel "
    "prime prince princess principal prism prize problem product project proof proton province puck pudding pulley "
    "pumpkin pupil puppy purchase purse push-up pushup puzzle pyramid quart queen query question quiz quizzes "
    "quotient rabbit race racket radii radio radish radius raft raindrop raisin range rank raspberry rat reader "
    "rebound receipt recipient rectangle referee region remainder rep report reptile request resident residue rhino "
    "rhombus rib ribbon riddle ride ring river road robot rock rocket rod roll rook room root rope rose round route "
    "row rug rule ruler run runner sailboat sailor salary sale sandal sandwich sausage scarf scarves scene school "
    "scientist scissors scoop scooter screen screw sculpture seal season seat secant secretary section sector seed "
    "segment seller semester senior sentence sequence series serve server serving session set shade shape share "
    "shareholder shark sharpener sheep sheet shelf shell shelves shift ship shirt shoe shop shopper shrimp sibling "
    "side sign singer sister sit-up situp skate skateboard sketch ski skirt sled slice slipper smoothie snack snail "
    "snake sneaker snowball snowflake snowman snowmen sock soda sofa soldier solution son song species spectator "
    "sphere spice spider spoon spoonful spot spring spy square squash squat squid squirrel stack stage stair stamp "
    "stanza star state station statue steak step stick sticker stock stone stop store storm story stove straw "
    "strawberry streamer street strike string student subgroup subject subscriber subsequence subset subspace suit "
    "sum sunrise sunset surgeon swan sweater sweatshirt sweet swimmer syllable table tablespoon tablet taco tag tale "
    "tangent tank tart task tax taxi tbsp tea teacher teacup team teaspoon teddy teenager television tenant tent term "
    "test tetrahedron text textbook theater theorem thief thieves thing throw ticket tie tiger tile tiling time tip "
    "tire toad toddler token tomato tool torch tortoise toss touchdown tour tourist tournament towel tower town toy "
    "tractor trailer train trapezium trapezoid traveler traveller tray tree triangle trip triple tromino trophy truck "
    "trumpet tsp tulip tunnel tuple turkey turn turnip turtle tv twin uncle uniform unit user vacation valley value "
    "van variable vector verb verse vertex vertices veterinarian video viewer village violin virus visitor volcano "
    "volunteer vote voter vowel waffle wage wagon waiter waitress walk wallet walnut warehouse watch water watermelon "
    "way wedding whale wheel wife win window wine wing winner wire witch wives wizard wolf wolves woman women word "
    "worker world worm writer yard yo-yo zebra zero "
)
"""What word problems count, in the singular."""
_FOREIGN = (
    "ページ メートル センチ キロ グラム リットル ドル ユーロ ポイント セット グループ クラス "
    "チーム ボール リンゴ りんご "
    "alumno apfel appel appels enfant estudiante euros flor fois huevo kinder kniha libri libro livre livro "
    "manzana mela murmeln naranja persona persone personen personne peso pessoa pieza pomme veces vez 个 個 "
    "只 隻 本 张 張 条 條 棵 辆 輛 页 頁 名 位 件 台 套 支 枝 箱 袋 盒 瓶 杯 种 種 次 人 岁 歲 角 朵 头 匹 枚 "
    "冊 歳 回 通り 層 层 组 組 对 對 根 块糖 颗 粒 户 家 篇 首 题 題 道 步 圈 节 班 个人 个苹果 平方米 "
    "平方厘米 平方公里 立方米 立方厘米 千米/小时 개 명 마리 권 살 장 번 가지 шт штук яблок человек способов "
    "раз äpfel bücher schüler stück élève façon pièce œuf niño maçã jabłek 명의 本书 个球 支铅笔 個蘋果 人の "
)
_NOUNS = frozenset((_ENGLISH + _FOREIGN).split())
_BEFORE_NOUNS = (
    "red blue green white black yellow brown pink purple small large big different distinct possible ordered real "
    "positive negative integer whole full equal complex unique new old hot chocolate paper gold silver school even "
    "odd prime such valid nonzero unordered rational fluid linear nautical light student wooden total additional "
    "extra remaining empty right obtuse acute isosceles equilateral lattice "
)
_ADJECTIVES = frozenset(_BEFORE_NOUNS.split())
"""They need a noun behind them."""
_TRAILING = {"total", "altogether", "old", "long", "tall", "wide", "high", "deep", "thick", "away", "each", "in"}
_BETWEEN = {"of"}
_CHANGES = re.compile(
    r"(?:or|and|more|less|fewer|not|no|than|at|least|most|if|to|from|over|under|plus|minus|between|about|but|below|above"
    r"|short|left|squared|cubed|mod|modulo|base|is|are|was|were|isn't|aren't|times|x|percent|negative|approximately"
    r"|half|halves|thirds?|quarters?|dozens?|scores?|gross|couples?|tens|ones|doubled?|doubles|tripled?|twice|thrice"
    r"|lakhs?|crores?|googol\w*|\w*illions?|hundreds?|thousands?|factorial|repeat\w*|recurring|ish|power|root|inverse"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w*illion)ths?|into|by|per|point"
    r"|wrong|incorrect|false|too|off|except|without|minus|multiplied|divided|added|subtracted|raised|as)\.?",
    re.IGNORECASE,
)
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3", "sq.": "^2", "平方": "^2", "立方": "^3"}
_CANONICAL = {spelling: unit for unit, (_, _, others) in _MEASURES.items() for spelling in (unit, *others.split())}
_FACTOR = re.compile(r"(.+?)(?:\^(-?\d+))?")
MAX_WORDS = 5


def changes_number(word: str) -> bool:
    """Tells whether a word behind a number makes it another one: "times", "halves", "less"."""
    return _CHANGES.fullmatch(word) is not None


def is_unit(word: str) -> bool:
    """Tells whether bare letters behind a number are a unit, not a product of variables."""
    return len(word) > 1 and (_measure(word) is not None or (len(word) > 2 and _noun(word) is not None))


def _measure(word: str) -> str | None:
    """The unit in its one spelling."""
    mega = word[:1] == "M" and len(word) < 4  # Mg is not mg
    for spelling in (word,) if mega else (word, word.lower()):
        for candidate in (spelling, *([spelling[:-1]] if spelling.endswith("s") and len(spelling) > 3 else [])):
            if candidate in _CANONICAL:
                return _CANONICAL[candidate]
    return None


def _noun(word: str, known: Collection[str] = ()) -> str | None:
    """A noun in the singular, of the list or of the words that are known from elsewhere."""
    lower = word.lower()
    singular = [lower, *([lower[:-1]] if lower.endswith("s") else [])]
    singular += [f"{lower[:-3]}y"] if lower.endswith("ies") else [lower[:-2]] if lower.endswith("es") else []
    if any(noun in _NOUNS for noun in singular):
        return singular[1] if len(singular) > 1 and singular[1] in _NOUNS else singular[0]
    if lower in known and not changes_number(lower) and _measure(lower) is None:
        return singular[1] if len(singular) > 1 and len(lower) > 3 else lower
    return None


def canonical_unit(text: str, known: Collection[str] | None = ()) -> str | None:
    """The unit in one spelling; ``None`` where the words change the number (``or more``) or are no unit at all.

    Args:
        known: words that are trusted to be what is counted; ``None``: all that do not change the number.

    >>> canonical_unit("square meters per hour")
    'h^-1 m^2'
    """
    text = re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,;:! ]|~|\\cdot|·|\*", " ", text).replace("\\circ", "°")
    text = re.sub(r"\s*\^\s*\{?(-?\d+)\}?", r"^\1", text)
    text = re.sub(r"(?:\s+|^)(?:per|an?)\s+|\s*/\s*", " / ", text)
    text = re.sub(r"\bmph\b", "mi / h", re.sub(r"\bk(?:p|m)h\b", "km / h", text))
    words = text.strip(" .").split()
    if words and words[0][0] in "百千万萬亿億" and _measure(words[0]) is None:
        words[:1] = [part for part in (words[0][0], words[0][1:]) if part]
    if words and words[0].lower() in MULTIPLIERS:
        rest = canonical_unit(" ".join(words[1:]), known) if len(words) > 1 else ""
        return None if rest is None else f"{words[0].lower()} {rest}".strip()
    if not words or len(words) > MAX_WORDS or words[0] == "/":
        return None
    measured = _measured(words)
    return measured if measured is not None else _counted(words, known)


def _measured(words: list[str]) -> str | None:
    """A product of powers of units, in order."""
    powers: dict[str, int] = {}
    power, sign = "", 1
    last = None
    for index, word in enumerate(words):
        if word == "/":
            sign = -1
        elif word.lower() in _POWERS and not power:
            power = _POWERS[word.lower()]
        elif last is not None and word.lower() in ("squared", "cubed"):
            powers[last] += sign * (1 if word.lower() == "squared" else 2)
        elif index > 0 and word.lower() in _TRAILING:
            continue
        else:
            match = _FACTOR.fullmatch(word.rstrip("."))
            unit = _measure(match[1]) if match else None
            if match is None or unit is None:
                return None
            last = unit
            powers[unit] = powers.get(unit, 0) + sign * int(match[2] or power.lstrip("^") or 1)
            power = ""
    if power:  # "5 square": of nothing
        return None
    powers = {unit: exponent for unit, exponent in powers.items() if exponent}
    return (
        " ".join(unit if exponent == 1 else f"{unit}^{exponent}" for unit, exponent in sorted(powers.items())) or None
    )


def _counted(words: list[str], known: Collection[str] | None) -> str | None:
    """Nouns with adjectives before them: "red marbles", "cups of flour"."""
    words = [word.strip(".()") for word in words]
    while len(words) > 1 and words[-1].lower() in _TRAILING:
        words = words[:-1]
    if words == ["total"]:
        return "unit"
    if any(changes_number(word) for word in words if word.lower() != "times"):
        return None
    if known is None:
        return " ".join(word if word == "/" else _measure(word) or _singular(word) for word in words)
    found = []
    for index, word in enumerate(words):
        last = index == len(words) - 1 or words[index + 1] in (*_BETWEEN, "/")
        lower = word.lower()
        noun = _measure(word) or _noun(word, known) or ("time" if lower == "times" else None)
        if noun is None and "of" in words[1:index] and index < len(words):
            noun = _singular(word)  # cups of flour
        if noun is None and not (not last and (lower in _ADJECTIVES or lower in known)):
            if index > 0 and not last and word in (*_BETWEEN, "/"):
                found.append(word)
                continue
            return None
        found.append(noun or lower)
    return " ".join(found)


def _singular(word: str) -> str:
    lower = word.lower()
    return _noun(word) or (lower.removesuffix("s") if len(lower) > 3 else lower)


@functools.lru_cache(maxsize=1024)
def size_of(unit: str) -> tuple[Fraction, tuple[tuple[str, int], ...]]:
    """A unit's size, and the powers of the basic units that it has: ``cm^2`` is 1/10000 of ``m`` to the power 2."""
    size = Fraction(1)
    dimensions: dict[str, int] = {}
    for factor in unit.split():
        name, _, exponent = factor.partition("^")
        power = int(exponent or 1)
        scale, base, _ = _MEASURES.get(name, (0, "", ""))
        size *= Fraction(scale or 1) ** power
        base = base or name
        dimensions[base] = dimensions.get(base, 0) + power
    return size, tuple(sorted((base, power) for base, power in dimensions.items() if power))

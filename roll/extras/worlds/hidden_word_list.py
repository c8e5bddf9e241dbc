"""Common English words of five letters, each letter from a to z."""

from __future__ import annotations

_LISTED = """
about above actor adult after again agent agree alarm album alive allow alone along among angle apple apron arena
argue armor aside audio avoid awake award bacon badge baker basic basin beach beard berry birch black blade blame
blank blast blend bless blind block bloom board boost booth brain brake brand brave bread break brick bride brief
bring broad broom brown brush build bunch cabin cable camel candy cargo carry catch cause chain chair chalk charm
chart cheap check cheek cheer chess chest chief child chime choir civic claim class clean clear clerk cliff climb
clock close cloth cloud clown coach coast coral couch count cover crack craft crane crate cream creek crest crisp
cross crowd crown crumb crust curve cycle daily dairy dance delay depth diary ditch dodge doubt dough draft drain
drama dream dress drift drink drive eager eagle early earth elbow elder empty enjoy enter equal event exact extra
fable faint faith false fancy favor feast fence ferry fever fiber field final flame flash fleet float flock floor
flour fluid flute focus forge found frame fresh front frost fruit ghost giant glass globe glory glove grace grain
grand grape graph grass great green greet group guard guess guest guide habit happy heart heavy hedge hinge hobby
honey horse hotel house human humor ideal image index inner issue jelly jewel joint judge juice knife knock label
large laser later laugh layer learn lemon level light limit linen liver local logic lucky lunch magic major maple
march match mayor medal melon mercy merit metal meter minor model money month motor mount mouse mouth movie music
nerve never night noble noise north novel nurse ocean offer olive onion orbit order other outer owner paint panel
paper party patch pause peace pearl penny phone photo piano piece pilot pitch place plain plane plant plate point
pound power press price pride prize proof proud pulse pupil queen quick quiet quilt radio raise ranch range rapid
ready reply ridge river roast robin robot rough round route royal ruler rural salad sauce scale scarf scene scope
score scout sense serve shade shape share sharp sheep shelf shell shine shirt shore short skill sleep slice slope
small smart smile smoke snack solid sound south space spare spark speak spice spoon sport staff stage stair stamp
stand steam steel stick stone storm story stove straw style sugar sunny sweet swing table teach thick thing think
tiger title toast token torch total touch tower track trade train treat trial trick truck trunk trust truth uncle
under union unity upper urban usual value vapor video virus visit vital vivid vocal voice wagon waste watch water
weigh wheat wheel where white whole woman world worry worth wound wrist write young youth
"""

WORDS = tuple(_LISTED.split())
"""In the order of the alphabet."""

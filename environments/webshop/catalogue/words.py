"""The vocabulary of the generated catalogue.

Lists are strings whose items are separated by "; ". A mark in front of an attribute says how a sentence uses it: none
for an adjective ("gluten free"), "=" for what can only stand in front of a noun ("long sleeve"), "+" for a part ("with
rubber sole") and "@" for a purpose ("for living room"). A "~" in front of a noun says that it takes no article.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.split("; "))


def _lists(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return lists by name, each of which begins on a line of its own."""
    rows = (row.partition(": ") for row in text.strip().replace("\n  ", " ").splitlines())
    return {name: _items(items) for name, _, items in rows}


class Kind(NamedTuple):
    """A kind of product, with its price range in dollars. The other fields are those of `Product`.

    Attributes:
        nouns: Names of its products; "~" marks those that take no article.
        attributes: Its attributes and those of its category, without their marks.
    """

    category: str
    query: str
    path: str
    nouns: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    low: float
    high: float
    attributes: tuple[str, ...]


_POOLS = _lists("""
colors: black; white; navy; grey; red; blue; green; pink; beige; brown; silver; gold; rose gold; light grey; dark grey;
  royal blue; hot pink; wine; khaki; charcoal; mint; walnut; army green; purple; yellow; turquoise; burgundy; clear;
  orange; teal; lavender; ivory; cream; camel; coral; sky blue; light blue; dark blue; olive; mustard; rust; taupe;
  champagne; coffee; apricot; plum; lilac; sage green; dusty rose; off white; black | white; navy | red; grey | white;
  black | gold; a-blue; b-green; c-pink; multi 1; multi 2; multicolor; leopard; camouflage; striped; plaid; floral
wood: natural oak; dark walnut; espresso; white oak; rustic brown; black; white; grey wash; antique white; cherry;
  maple; weathered grey; honey pine; mahogany; graphite
metal: black; brushed nickel; antique brass; chrome; bronze; matte white; copper; polished gold; gunmetal; champagne
  gold
shades: porcelain; ivory; nude; sand; honey; caramel; almond; cocoa; espresso; rosewood; berry; cherry red; peach;
  mauve; plum; coral crush; soft pink; brick; 01 fair; 02 light; 03 medium; 04 tan; 05 deep
hair: jet black; natural black; dark brown; chestnut brown; ash blonde; honey blonde; platinum blonde; auburn; burgundy;
  copper red; silver grey; ombre brown; ombre blonde; 1b; 4 medium brown; 27 strawberry blonde; 613 bleach blonde
apparel: x-small; small; medium; large; x-large; xx-large; 3x-large; 4x-large; 5x-large; large tall
waists: 28; 29; 30; 31; 32; 33; 34; 36; 38; 40; 42; 44; 32w x 30l; 34w x 32l; 36w x 34l; 38w x 30l
shoes: 5; 5.5; 6; 6.5; 7; 7.5; 8; 8.5; 9; 9.5; 10; 10.5; 11; 12; 13; 7 wide; 8 wide; 9 wide; 10 wide; 8 narrow
beds: twin; twin xl; full; queen; king; california king; crib; toddler
panels: 42"w x 45"l; 42"w x 63"l; 52"w x 45"l; 52"w x 63"l; 52"w x 84"l; 52"w x 96"l; 60"w x 84"l; 60"w x 90"l; 100"w x
  84"l
volumes: 1 fl oz; 1.7 fl oz; 2 fl oz; 3.4 fl oz; 8 ounce; 8 ounce (pack of 2); 12 ounce; 16 ounce (pack of 1); 32 fl oz
weights: 4 ounce; 6 ounce (pack of 3); 8 ounce; 12 ounce; 12 ounce (pack of 6); 1 pound; 2 pound; 2.5 pound (pack of 1);
  5 pound
counts: 1 count; 2 count; 4 count; 6 count; 8 count; 12 count; 24 count; 1-pack; 3-pack; 10 count (pack of 2)
lengths: 1.5 feet; 3 feet; 6 feet; 10 ft; 12 ft; 15 ft; 25 feet; 33 feet; 50 feet; 6 feet (2 pack)
inches: 8x10 inch; 12x16 inch; 12 x 18 inch; 16x20 inch; 18 x 18 inch; 20 x 20 inch; 24x36 inch; 30x40 inch; 12 x 20
  inch
hair lengths: 8 inch; 10 inch; 12 inch; 14 inch; 16 inch; 18 inch; 20 inch; 22 inch; 24 inch; 26 inch
rugs: 2 x 3 ft; 2 x 6 ft; 3 x 5 ft; 4 x 6 ft; 5 x 7 ft; 6 x 9 ft; 8 x 10 ft; 9 x 12 ft; 6 ft round
widths: 24 inch; 30 inch; 36 inch; 42 inch; 48 inch; 55 inch; 60 inch; 72 inch
screens: 7 inch; 10.1 inch; 11 inch; 13.3 inch; 14 inch; 15.6 inch; 17 inch
watch: 38mm; 40mm; 41mm; 42mm; 44mm; 45mm; small band; large band
memory: 8gb; 16gb; 32gb; 64gb; 128gb; 256gb; 512gb; 1tb; 16gb ram | 512gb ssd; 32gb ram | 1tb ssd
models: for model 8; for model 11; for model 12; for model 12 mini; for model 13; for model 13 pro; for model 13 max;
  for tablet 10; for galaxy 20; for galaxy 21; for galaxy 21 ultra
kits: body only; with carrying case; with tripod; starter kit; with 32gb card; travel bundle; upgraded version
seats: left facing; right facing; with ottoman; without ottoman; with usb charger; reclining; 2 seater; 3 seater
looks: classic; modern; farmhouse; with lights; without lights; set of 2; set of 4; tall version
sets: single; value pack; gift set; refill; sample set
soles: low top; mid top; high top; with laces; slip on
shapes: rectangular; runner; oval; hexagon
fits: men; women; youth; big boys; big girls
sweets: dark chocolate; milk chocolate; french vanilla; maple; caramel sea salt; peanut butter; cinnamon; strawberry;
  blueberry; mixed berry; lemon; coconut; mocha; hazelnut; pumpkin spice; apple pie; variety pack
savory: sea salt; honey mustard; spicy chili; smoky barbecue; garlic herb; teriyaki; cheddar; black pepper; jalapeno;
  sweet onion; original; buffalo; lemon pepper; rosemary; variety pack
drinks: peach; lemon ginger; wild cherry; green tea; mint; chai; hibiscus; raspberry; ginger lime; mango; earl grey;
  unsweetened; dark roast; medium roast; light roast; breakfast blend; decaf
scents: fresh linen; citrus mint; unscented; coconut lime; woody; eucalyptus; vanilla bean; rose water; lavender fields;
  sandalwood; cucumber melon; jasmine; ocean breeze; tea tree mint; sweet orange; white musk
""")
"""The values of options that kinds of products choose from."""

# For each category: its widest category and its attributes; then a paragraph for each kind, which gives the query, the
# path, the nouns, the options with their pools, the prices and the attributes.
_KINDS = {
    "beauty": """
Beauty & Personal Care | cruelty free; paraben free; long lasting; =high quality; easy use; @sensitive skin; alcohol
  free; =travel size; eco friendly; leak proof; bpa free; easy carry; +natural ingredients; dermatologist tested;
  fragrance free; non toxic; easy clean; @daily use; latex free; +gift packaging
makeup remover | Skin Care › Face › Cleansers | ~makeup remover wipes; ~micellar water; cleansing balm | scent=scents
  size=volumes style=sets | 5 30 | oil free; +green tea; @dry skin; @waterproof makeup; hypoallergenic
scrubs & body treatments | Skin Care › Body › Scrubs & Body Treatments | body scrub; sugar scrub; body polish |
  scent=scents size=volumes style=sets | 8 45 | +coconut oil; +sea salt; =dead skin remover; @dry skin; +shea butter
refillable containers | Tools & Accessories › Refillable Containers | travel bottle set; cosmetic jar; spray bottle |
  color=colors size=counts | 6 25 | +fine mist; +screw lid; +bpa free silicone; +labels included; shatter proof
toothpaste | Oral Care › Toothpaste | ~whitening toothpaste; ~charcoal toothpaste; ~toothpaste tablets | flavor=drinks
  size=counts | 4 20 | fluoride free; =teeth whitening; @bad breath; @sensitive teeth; +baking soda
hair extensions | Hair Care › Extensions, Wigs & Accessories › Hair Extensions | ~hair extensions; ponytail extension;
  ~braiding hair | color=hair size=hair~lengths | 12 160 | heat resistant; +synthetic hair; +human hair; =double weft;
  tangle free
eyelash tools | Makeup › Eyes › Lash Tools | eyelash curler; lash applicator; set of brow tweezers | color=colors
  style=kits | 4 22 | +stainless steel; +non slip grip; =rose gold finish; +silicone pads; rust proof
lipsticks | Makeup › Lips › Lipstick | lipstick; liquid lip color; lip crayon | color=shades size=counts style=sets |
  5 38 | highly pigmented; smudge proof; +vitamin e; =matte finish; +argan oil
foundation makeup | Makeup › Face › Foundation | liquid foundation; cushion foundation; powder foundation |
  color=shades size=volumes | 8 60 | =full coverage; =medium coverage; oil free; +hyaluronic acid; =sun protection
face moisturizers | Skin Care › Face › Creams & Moisturizers | face moisturizer; night cream; ~hydrating face lotion |
  scent=scents size=volumes style=sets | 9 95 | anti aging; +hyaluronic acid; @fine lines; @dry skin; non greasy;
  +vitamin c
shampoo & conditioner | Hair Care › Shampoo & Conditioner | ~volumizing shampoo; ~repair conditioner; shampoo bar |
  scent=scents size=volumes style=sets | 7 50 | +argan oil; +tea tree; color safe; @damaged hair; @curly hair; =hair
  growth
nail polish | Foot, Hand & Nail Care › Nail Polish | ~gel nail polish; nail lacquer; nail art kit | color=shades
  size=counts style=sets | 4 35 | quick drying; chip resistant; =high gloss; +uv lamp; peel off
bath soaps | Personal Care › Bath & Bathing Accessories › Soaps | soap bar; ~foaming hand soap; ~body wash |
  scent=scents size=counts | 4 32 | +goat milk; +aloe vera; antibacterial; vegan formula; handmade
""",
    "electronics": """
Electronics | easy install; heavy duty; =high performance; +carrying case; water resistant; easy use; light weight;
  =compact size; long lasting; dust proof; easy carry; =wide compatibility; eco friendly; drop resistant; easy clean;
  @everyday use; +lifetime support; scratch resistant
hdmi cables | Audio & Video Accessories › Cables & Interconnects | hdmi cable; hdmi extension cord; hdmi adapter |
  color=colors size=lengths style=kits | 6 45 | gold plated; =ultra hd; +braided cord; =1080p resolution; +ethernet
  channel; blu ray ready; plug play; =high speed
screen protectors | Cell Phones › Accessories › Screen Protectors | screen protector; privacy glass; camera lens film
  | size=models style=kits | 5 25 | +tempered glass; =high definition; case friendly; anti glare; bubble free;
  fingerprint proof
remote controls | Television & Video › Remote Controls | remote control; universal remote; voice remote | color=colors
  style=kits | 6 40 | +backlit keys; +infrared signal; 4k ready; +aaa batteries; =learning function; plug play;
  +batteries included
bluetooth speakers | Portable Audio & Video › Portable Speakers | bluetooth speaker; mini soundbar; shower speaker |
  color=colors style=looks | 15 240 | =wireless bluetooth; =stereo sound; =hands free; +deep bass; waterproof; +led
  lights; +usb port; +batteries included; fast charging
headphones | Headphones › Over-Ear Headphones | ~over ear headphones; gaming headset; ~wireless earbuds | color=colors
  style=kits | 12 320 | noise cancelling; =wireless bluetooth; =stereo sound; =hands free; +built in microphone;
  +memory foam cushions; fast charging; @gym workout
security cameras | Camera & Photo › Video Surveillance | security camera; doorbell camera; dash camera | style=kits
  size=counts | 25 400 | +night vision; =motion detection; =1080p resolution; =two way audio; weather proof; +cloud
  storage; plug play; +batteries included
phone cases | Cell Phones › Accessories › Cases & Covers | phone case; wallet case; bumper cover | color=colors
  size=models style=sets | 7 45 | wireless charging; shock proof; non slip; +card holder; +kickstand; anti yellow
laptop computers | Computers & Tablets › Laptops | laptop; notebook computer; convertible laptop | size=memory
  style=screens | 220 1900 | =quad core; =intel core; +backlit keyboard; +touch screen; +fingerprint reader; =solid
  state drive; =high speed; +usb port; fast charging
smartwatch bands | Wearable Technology › Smartwatch Accessories | smartwatch band; sport strap; ~metal watch links |
  color=colors size=watch | 6 40 | quick release; +stainless steel; sweat proof; +silicone material; +genuine leather;
  +adjustable clasp
tripods | Camera & Photo › Tripods & Monopods | phone tripod; camera tripod; flexible tripod | color=colors
  size=widths | 14 180 | +aluminum alloy; +carbon fiber; +phone holder; =360 degree rotation; +remote shutter; +non
  slip feet
chargers & power adapters | Cell Phones › Accessories › Chargers | wall charger; power adapter; charging station |
  color=colors size=counts | 8 70 | +usb c port; travel friendly; =overheat protection; =dual port; +foldable plug;
  +output protection; fast charging; energy efficient; plug play
projectors | Television & Video › Video Projectors | video projector; mini projector; movie projector | color=colors
  style=kits | 55 900 | =high definition; =1080p resolution; =wireless bluetooth; +hdmi port; =keystone correction;
  +built in speaker; +usb port; plug play; energy efficient
""",
    "garden": """
Home & Kitchen | @living room; easy clean; =high quality; =mid century; space saving; heavy duty; eco friendly; @home
  decor; =contemporary style; fade resistant; =high density; water resistant; @small spaces; scratch resistant;
  =modern design; pet friendly; +lifetime warranty; odor free
mattresses | Furniture › Bedroom Furniture › Mattresses | mattress; mattress topper; spring mattress | size=beds
  style=looks color=colors | 80 1400 | +memory foam; =medium firm; pressure relief; +gel infused foam; @back pain;
  =king size; fully assembled
window coverings | Home Décor › Window Treatments | ~blackout curtains; ~roller shades; ~curtain panels | size=panels
  color=colors | 14 90 | machine washable; light blocking; =thermal insulated; +rod pocket; +grommet top; cordless;
  @dining room
wall art | Home Décor › Wall Art › Posters & Prints | canvas print; framed poster; metal sign | size=inches
  color=colors | 9 150 | ready hang; +wood frame; hand painted; =printed artwork; =stretched canvas; +vintage style;
  @dining room
sofas and couches | Furniture › Living Room Furniture › Sofas | sectional sofa; loveseat; sleeper couch | color=colors
  style=seats | 180 1900 | +faux leather; +solid wood legs; button tufted; +storage space; +metal frame; +memory foam;
  +removable cover; easy assemble; =assembly required
throw pillow covers | Bedding › Decorative Pillows | throw pillow cover; cushion case; pillow sham | color=colors
  size=inches style=looks | 7 40 | machine washable; double sided; +hidden zipper; +faux fur; super soft; +velvet
  fabric
bookcases | Furniture › Home Office Furniture › Bookcases | bookcase; ladder bookcase; storage cabinet | color=wood
  size=widths style=looks | 45 420 | +solid wood; +storage space; +metal frame; wall mounted; +open front; +anti tip
  kit; =engineered wood; easy assemble; =assembly required
area rugs | Home Décor › Area Rugs, Runners & Pads | area rug; hallway runner; shag carpet | color=colors size=rugs
  style=shapes | 18 380 | machine washable; non slip; stain resistant; =low pile; +cotton backing; hand woven; @dining
  room
dining chairs | Furniture › Kitchen & Dining Room Furniture › Chairs | dining chair; bar stool; kitchen side chair |
  color=colors style=looks | 55 520 | +solid wood legs; +faux leather; +velvet fabric; +metal frame; +padded seat;
  stackable; height adjustable; @dining room; easy assemble; =assembly required
table lamps | Lighting & Ceiling Fans › Lamps | table lamp; bedside lamp; desk lamp | color=metal style=looks | 16 210
  | +usb port; =touch control; dimmable; +glass shade; +brushed nickel finish; energy efficient; +linen shade; @dining
  room; easy assemble
storage baskets | Storage & Organization › Baskets & Bins | storage basket; laundry hamper; closet bin | color=colors
  size=counts | 9 65 | hand woven; foldable; +rope handles; +cotton rope; +lid included; =large capacity; easy
  assemble
bed frames | Furniture › Bedroom Furniture › Beds | platform bed frame; upholstered headboard; bunk bed | size=beds
  color=wood | 95 1100 | +mattress base needed; noise free; +wood slats; +metal frame; =under bed storage; +solid wood;
  +faux leather; easy assemble; =assembly required
christmas ornaments | Seasonal Décor › Ornaments | tree ornament; hanging garland; holiday figurine | color=metal
  style=looks | 5 48 | shatter proof; hand painted; battery operated; glitter finish; +gift bag; +hanging string
""",
    "fashion": """
Clothing, Shoes & Jewelry | =machine wash; =hand wash; =dry clean; @daily wear; light weight; quick drying; =high
  quality; =comfortable fit; =fashion design; =soft material; =stretch fabric; odor resistant; fade resistant; skin
  friendly; @special occasions; @office wear; +reinforced seams; eco friendly
men's shorts | Men › Clothing › Shorts | ~cargo shorts; ~running shorts; ~swim trunks | color=colors size=apparel
  fit~type=fits | 9 60 | +elastic waist; +drawstring closure; =slim fit; =relaxed fit; +zipper pockets; moisture
  wicking; @gym workout; =breathable mesh
men's t-shirts & tanks | Men › Clothing › Shirts › T-Shirts | t-shirt; tank top; henley shirt | fit~type=fits
  color=colors size=apparel | 8 40 | =long sleeve; =short sleeve; =slim fit; =classic fit; +crew neck; +cotton
  heather; =needle sleeve; @gym workout; =breathable mesh
women's slippers | Women › Shoes › Slippers | ~house slippers; ~clog slippers; ~slide sandals | color=colors
  size=shoes style=soles | 10 70 | +rubber sole; +memory foam; +faux fur; anti slip; =open toe; =closed toe; +arch
  support; @winter weather
women's dresses | Women › Clothing › Dresses | maxi dress; sun dress; wrap dress | color=colors size=apparel | 14 95 |
  =long sleeve; =short sleeve; sleeveless; =high waist; +v neck; =floral print; +side pockets; =knee length; @teen
  girls
men's button-down shirts | Men › Clothing › Shirts › Button-Down Shirts | button-down shirt; flannel shirt; linen
  shirt | color=colors size=apparel | 12 80 | =long sleeve; =short sleeve; =slim fit; =regular fit; +button closure;
  wrinkle free; +chest pocket
women's hoodies & sweatshirts | Women › Clothing › Hoodies & Sweatshirts | pullover hoodie; zip sweatshirt; fleece
  sweater | color=colors size=apparel | 12 85 | =long sleeve; =loose fit; +drawstring hood; +kangaroo pocket; +fleece
  lining; =off shoulder; =crop length; @winter weather; @teen girls
women's jeans | Women › Clothing › Jeans | ~skinny jeans; ~bootcut jeans; ~boyfriend jeans | color=colors size=waists
  | 18 110 | =high waist; =mid rise; =low rise; +button closure; =butt lifting; =straight leg; =wide leg; =ripped
  style; =imported zipper
men's sneakers | Men › Shoes › Fashion Sneakers | ~canvas sneakers; ~running shoes; ~walking shoes | color=colors
  size=shoes style=soles | 22 140 | +rubber sole; +lace closure; slip resistant; +arch support; +memory foam;
  +ethylene vinyl sole; =wide toe; @gym workout; =breathable mesh
women's swimwear | Women › Clothing › Swimsuits & Cover Ups | bikini set; one piece swimsuit; swim cover up |
  color=colors size=apparel | 12 75 | =tummy control; =high waist; +padded cups; +halter neck; quick dry; +polyester
  spandex; +adjustable straps; @teen girls
men's suits & sport coats | Men › Clothing › Suits & Sport Coats | suit jacket; sport coat; two piece suit |
  color=colors size=apparel | 35 240 | =slim fit; =regular fit; +notch lapel; +button closure; fully lined; +polyester
  spandex; wrinkle free
women's boots | Women › Shoes › Boots | ~ankle boots; ~snow boots; ~knee high boots | color=colors size=shoes
  style=soles | 25 170 | +rubber sole; +faux leather; +side zipper; water proof; =low heel; =high heel; +plush lining;
  +steel toe; @winter weather
leggings | Women › Clothing › Active › Leggings | ~yoga leggings; ~workout tights; ~capri leggings | color=colors
  size=apparel | 9 65 | =high waist; =tummy control; moisture wicking; +nylon spandex; +side pockets; squat proof;
  =butt lifting; @gym workout; =breathable mesh
""",
    "grocery": """
Grocery & Gourmet Food | gluten free; non gmo; plant based; sugar free; keto friendly; low carb; high protein;
  certified organic; dairy free; +natural colors; individually wrapped; low sodium; soy free; +resealable bag; nut
  free; kosher certified; fat free; @gift basket; usda organic; high fiber; low calorie
meat substitutes | Meat Substitutes | ~veggie burger patties; ~soy jerky; ~tofu crumbles | flavor=savory size=weights
  style=sets | 5 45 | ready eat; +pea protein; cholesterol free; +protein per serving; fully cooked
granola bars | Snack Foods › Bars › Granola | ~protein bars; ~granola bars; ~fruit bars | flavor=sweets size=counts |
  6 50 | grain free; +whole grain oats; +natural flavors; peanut free; +real fruit
ground coffee | Beverages › Coffee › Ground Coffee | ~ground coffee; ~cold brew concentrate; ~espresso pods |
  flavor=drinks size=weights | 7 60 | fair trade; =rich flavor; =single origin; shade grown; +compostable pods
nuts & seeds | Snack Foods › Nuts & Seeds | ~roasted almonds; ~pumpkin seeds; ~cashew clusters | flavor=savory
  size=weights style=sets | 6 55 | dry roasted; lightly salted; +healthy fats; raw unsalted; shell free
dried fruit | Produce › Dried Fruits & Vegetables | ~dried mango slices; ~raisins; ~banana chips | style=sweets
  size=weights | 5 40 | freeze dried; unsweetened; sulfite free; +real fruit; sun dried
herbal tea | Beverages › Tea › Herbal | ~herbal tea bags; ~loose leaf tea; ~iced tea mix | flavor=drinks size=counts |
  4 35 | caffeine free; fair trade; hand picked; +natural flavors; +antioxidant blend
crackers | Snack Foods › Crackers | ~wheat crackers; ~rice crackers; ~cheese crisps | flavor=savory size=weights
  style=sets | 4 36 | oven baked; =whole grain; trans fat free; grain free; +simple ingredients
sauces & dips | Sauces, Gravies & Marinades | ~hot sauce; ~pasta sauce; ~salad dressing | flavor=savory size=volumes |
  4 30 | ready use; =small batch; msg free; +olive oil; gluten free certified
chocolate candy | Candy & Chocolate › Chocolate | chocolate bar; ~chocolate truffles; ~fudge squares | flavor=sweets
  size=weights style=sets | 5 60 | fair trade; +cocoa butter; +birthday gift bag; hand crafted; +natural flavors
popcorn | Snack Foods › Popcorn | ~microwave popcorn; ~kettle corn; ~popcorn kernels | flavor=savory size=counts | 4
  38 | air popped; =whole grain; +butter flavor; trans fat free; ready eat
baking mixes | Cooking & Baking › Baking Mixes | ~pancake mix; ~brownie mix; ~cake mix | flavor=sweets size=weights
  style=sets | 4 34 | easy prepare; grain free; +almond flour; egg free; +whole wheat
plant milk | Dairy Alternatives › Plant Milk | ~oat milk; ~almond milk; ~coconut milk | flavor=sweets size=volumes | 4
  42 | long keeping; +added calcium; lactose free; =barista quality; unsweetened
""",
}

# Shares in hundredths: how many of 100 products are of the category.
SHARES: Mapping[str, int] = {"beauty": 24, "electronics": 23, "garden": 21, "fashion": 20, "grocery": 12}

# Attributes that exclude each other; a near-duplicate often differs in one of them.
_EXCLUSIVE = (
    ("machine wash", "hand wash", "dry clean"),
    ("long sleeve", "short sleeve", "sleeveless"),
    ("slim fit", "relaxed fit", "classic fit", "regular fit", "loose fit"),
    ("high waist", "mid rise", "low rise"),
    ("straight leg", "wide leg"),
    ("low heel", "high heel"),
    ("open toe", "closed toe"),
    ("synthetic hair", "human hair"),
    ("full coverage", "medium coverage"),
    ("faux leather", "velvet fabric", "faux fur"),
    ("rod pocket", "grommet top"),
    ("1080p resolution", "ultra hd"),
    ("quad core", "intel core"),
    ("aluminum alloy", "carbon fiber"),
    ("glass shade", "linen shade"),
    ("machine washable", "dry clean"),
    ("certified organic", "usda organic"),
    ("lightly salted", "raw unsalted"),
    ("fully assembled", "easy assemble", "assembly required"),
    ("solid wood", "engineered wood"),
    ("silicone material", "genuine leather", "stainless steel"),
)

RIVALS: Mapping[str, frozenset[str]] = {
    name: frozenset(rival for group in _EXCLUSIVE if name in group for rival in group if rival != name)
    for names in _EXCLUSIVE
    for name in names
}

# Other words for an attribute, which are used in the same place of a sentence.
_PARAPHRASES = """
machine wash: machine washable; hand wash: hand washable; dry clean: dry clean only; long lasting: durable / very long
lasting; easy use: easy to use / simple to use; easy carry: easy to carry; easy clean: easy to clean; easy install: easy
to install; easy assemble: easy to assemble; easy prepare: easy to prepare; plug play: plug and play; ready eat: ready
to eat; ready hang: ready to hang; ready use: ready to use; light weight: lightweight; high quality: good quality / well
made; eco friendly: good for the environment / environmentally friendly; leak proof: leakproof / safe from leaks; non
toxic: toxin free / without toxins; fragrance free: without fragrance; alcohol free: without alcohol; sugar free:
without sugar / with no sugar; gluten free: without gluten; dairy free: without dairy; nut free: without nuts; soy free:
without soy; caffeine free: without caffeine; low carb: low in carbs; low sodium: low in sodium; low calorie: low in
calories; high protein: rich in protein / high in protein; high fiber: high in fiber; certified organic: organic; plant
based: vegan / made from plants; individually wrapped: wrapped one by one; heavy duty: really sturdy; space saving: able
to save space; water resistant: resistant to water; high speed: very fast; fast charging: quick to charge; quick drying:
quick to dry; non slip: anti slip; living room: the living room / my living room; dining room: the dining room / my
dining room; home decor: decorating my home; daily wear: everyday wear; gym workout: working out at the gym; carrying
case: case for carrying; batteries included: included batteries; damaged hair: my damaged hair; curly hair: my curly
hair; back pain: my back pain; hand painted: painted by hand; hand woven: woven by hand; scratch resistant: resistant to
scratches; noise cancelling: able to cancel noise; pet friendly: safe for pets; anti aging: good against aging;
sensitive skin: my sensitive skin; dry skin: my dry skin
"""
PARAPHRASES: Mapping[str, tuple[str, ...]] = {
    name: tuple(others.split(" / "))
    for name, _, others in (row.partition(": ") for row in _items(" ".join(_PARAPHRASES.split())))
}

# With one of these words, an adjective stands behind its noun: "easy to clean".
BEHIND = frozenset(_items("to; without; with; in; for; of; against; by; made; good; one; able"))

_ADJECTIVES = "premium; classic; professional; deluxe; luxury; original; practical; essential; favorite; popular"
ADJECTIVES: Mapping[str, tuple[str, ...]] = {
    category: _items(f"{_ADJECTIVES}; {own}")
    for category, own in {
        "beauty": "gentle; soft; refreshing; silky; smooth; portable; mini; elegant; natural; gorgeous; pure; radiant",
        "electronics": "portable; compact; slim; adjustable; durable; smart; modern; upgraded; powerful; reliable",
        "garden": "vintage; modern; rustic; elegant; decorative; durable; soft; stylish; cozy; beautiful; sturdy",
        "fashion": "casual; lightweight; soft; stylish; vintage; trendy; comfortable; elegant; cute; warm; breathable",
        "grocery": "gourmet; delicious; artisan; traditional; crunchy; tasty; fresh; wholesome; authentic; hearty",
    }.items()
}
EXTRAS = _lists("""
beauty: gentle daily care; smooth and radiant look; salon results at home; gift for her; suitable for all ages;
  refreshing spa feeling; perfect for your bathroom; deep nourishing formula; for day and night; beauty essentials
electronics: compatible with most devices; upgraded chip; replacement accessories; for home and office; stable
  connection; one year warranty; works with phones and tablets; crystal clear picture; simple setup; latest version
garden: accent for bedroom; farmhouse decoration; entryway and hallway; apartment and dorm; multipurpose organizer;
  sturdy construction; housewarming gift; indoor and outdoor; minimalist furniture; cozy atmosphere
fashion: casual summer beach; party and vacation; trendy street look; plus size available; holiday gift idea; cute
  graphic pattern; outdoor hiking and camping; office and business; all season; vintage inspired
grocery: healthy snack; family favorite; perfect for lunch bags; made in small batches; bulk value; kitchen pantry
  staple; real taste; no preservatives; on the go; great for sharing
""")
PEOPLE = _items(
    "women; men; kids; adults; home; office; travel; gifts; outdoor use; families; beginners; the whole year;"
    " friends; mom and dad; students; the weekend"
)
SYLLABLES = _items(
    "ka; lo; vi; ren; to; mar; si; dex; no; bel; ru; han; zo; fir; qua; pel; ty; os; lum; ar; nex; ela; dor; mi"
)

# {this} {noun} {are}: "this t-shirt is" or "these jeans are". {ATTRIBUTE} and {EXTRA} are in capitals.
BULLETS = (
    "{ATTRIBUTE}: {this} {noun} {are} {adjective} and made for {people}.",
    "{ATTRIBUTE} - you will enjoy it every day, with friends or alone.",
    "{ATTRIBUTE}: our customers choose it because it is {adjective} and {attribute}.",
    "Designed for {people}: {adjective} and {attribute}.",
    "Our {noun}: {attribute}, {an_adjective} choice for {people}.",
    "What you get: the {adjective} {noun} and our friendly customer service, {extra}.",
    "Made to be {adjective} and {attribute}: {extra}, tested by our team before shipping.",
    "Great gift in {an_adjective} package: {brand} {noun}, {attribute}.",
    "Please check the measurements before ordering, {attribute}, {extra}.",
    "If you have any questions about {this} {noun}, contact us and we will answer within 24 hours.",
    "Satisfaction guaranteed: {attribute} or your money back.",
    "{EXTRA}: the {adjective} {noun} that we recommend, {attribute}.",
    "{EXTRA} - {attribute}, and more comfortable than before.",
    "Only the best for {people}: {attribute} and {adjective} at the same time.",
)
DESCRIPTIONS = (
    "The {brand} {noun}, {attribute}, {are} ready for {people}.",
    "Whether you buy it for {people} or for yourself, you will find it {adjective}.",
    "Specifications: {attribute}, {adjective}, {extra}.",
    "We believe that {this} {noun} should be {adjective} and {attribute}.",
    "Package includes: {brand} {noun}. Color may differ slightly because of the light.",
    "{brand} has been making {adjective} products since 2009.",
    "Note: {attribute}. Please allow a small difference in size because of manual measurement.",
    "Enjoy {extra} with {this} {adjective} {noun}.",
    "Ideal for {people}: {attribute}, {extra}.",
    "Thank you for visiting our shop, we hope you like the {noun}.",
)
# Sentences with the query, which let a search for it find the product.
MENTIONS = (
    "{An_adjective} choice among {query}.",
    "One of our best {query}.",
    "See also our other {query}.",
    "For everyone who is looking for {query}.",
)

FRAMES = _items(
    "Find me {}; I am looking for {}; I need {}; I want to buy {}; Show me {}; Looking for {}; Please find {}; Can"
    " you find me {}; I would like {}; Get me {}; Help me find {}; Search for {}; I'm shopping for {}; I'm interested"
    " in {}; We need {}; Let me see {}"
)
# {thing} has an article, and {options} starts with a space or is empty.
HUMAN_FRAMES = _items(
    "i am looking for {thing}{options}.; i need {thing}{options}.; looking for {thing}{options}; find"
    " {thing}{options}; can you find {thing}{options}?; i would like to buy {thing}{options}.; i want"
    " {thing}{options}.; my sister asked me for {thing}{options}.; please help me get {thing}{options}.; buy me"
    " {thing}{options}; hello, do you sell {thing}{options}?; i am trying to find {thing}{options}, can you help?;"
    " it's time to replace mine, so i need {thing}{options}.; as a gift i want {thing}{options}."
)
OPTION_PHRASES: Mapping[str, tuple[str, ...]] = {
    "color": ("in {}", "in the color {}", "in {} color", "and it should be {}"),
    "size": ("in size {}", "size {}", "and the size should be {}", "in the size {}"),
    "style": ("in the {} style", "style {}", "in style {}"),
    "scent": ("with the scent {}", "smelling of {}", "in {} scent"),
    "flavor": ("in {} flavor", "flavored {}", "tasting of {}"),
    "fit type": ("for {}", "with the fit type {}", "in a fit for {}"),
}

_MISSPELLINGS = """
accessories:accesories/acessories accent:acent adjustable:adjustible among:amoung answer:anser apartment:appartment
atmosphere:atmosfere authentic:authentik available:availible/avaliable because:becuase/becouse
beautiful:beautifull/beatiful before:befor believe:beleive beginners:begginers bedroom:bedrom
bluetooth:bluetoth/blutooth body:bodie breathable:breatheable business:busness camera:camara/camra candy:candie
casual:causal charger:chager chocolate:chocolat/choclate choice:choise classic:clasic closure:closer coconut:cocunut
coffee:cofee/coffe collection:colection color:colour comfortable:comfortible/confortable compatible:compatable
compact:compakt conditioner:conditoner connection:conection construction:constuction contact:contackt cotton:coton
cover:covver customer:custommer customers:custumers curtains:curtins/cutains cushion:cusion daily:dayly
decoration:decoraton definition:defintion delicious:delicous deluxe:delux design:desing designed:desinged
devices:devises dining:dinning dress:dres dresses:dreses durable:durible easy:easi/eazy elastic:elastik elegant:elegent
enjoy:enjoi essential:essental everyday:everday/evryday extension:extention fabric:fabirc family:familly fashion:fasion
favorite:favourite/favorit foam:fome free:fre friends:freinds furniture:furnature gentle:gental genuine:genuin gift:gitf
glass:glas gluten:glutten gorgeous:gorgous great:grate guaranteed:garanteed/guarenteed hair:hiar handle:handel
headphones:headfones headset:hedset healthy:helthy heavy:hevy high:hihg holiday:holliday home:hom house:hous ideal:ideel
includes:inculdes ingredients:ingrediants kitchen:kichen/kitchin large:larg laptop:labtop leather:lether
leggings:legings length:lenght light:ligth lightweight:lightwieght lipstick:lipstic living:livng long:lon luxury:luxery
machine:mashine/machin made:mad material:materal mattress:matress/mattres measurement:measurment
measurements:measurments memory:memmory/memry men:mens modern:moderen money:mony natural:naturel necessary:neccessary
office:ofice/offise one:won organic:orgainic original:orginal outdoor:outdor package:packege party:partie people:peaple
perfect:perfact please:plese pillow:pilow/pillo pocket:poket portable:portible practical:practicle
premium:premimum/premuim products:produts professional:proffesional projector:projecter protector:protecter
protein:protien quality:qualty/quallity questions:qustions quick:quik radiant:radient ready:redy
recommend:recomend/reccomend refreshing:refeshing reliable:relyable remote:remot replacement:replacment
resistant:resistent rubber:ruber satisfaction:satisfacton screen:sreen/screan security:securty service:servise
shampoo:shampo shirt:shrit shoes:shose short:shrot should:shoud size:sise skin:sking sleeve:sleve slightly:slighty
slippers:slipers/slippars smooth:smoth sneakers:sneekers snack:snak soft:sof speaker:speeker/speker stainless:stainles
storage:storege sturdy:sturdey style:stlye stylish:stilish suitable:suiteable summer:sumer table:tabel tested:testet
traditional:tradtional travel:travle/travell trendy:trendie universal:univeral vacation:vaction value:valu
versatile:versitile vintage:vintige version:verson waist:waste warranty:warrenty water:watter weekend:weakend which:wich
winter:wintr wireless:wirless/wireles within:whithin women:woman/wemen year:yaer zipper:ziper
"""
MISSPELLINGS: Mapping[str, tuple[str, ...]] = {
    word: tuple(wrong.split("/")) for word, _, wrong in (pair.partition(":") for pair in _MISSPELLINGS.split())
}


def _read_kinds() -> tuple[tuple[Kind, ...], dict[str, str]]:
    """Return the kinds, and the mark of every attribute."""
    kinds = []
    marks: dict[str, str] = {}

    def attribute(marked: str) -> str:
        mark = marked[0] if marked[0] in "=+@" else ""
        name = marked.removeprefix(mark)
        marks.setdefault(name, mark)
        return name

    for category, rows in _KINDS.items():
        first, *others = rows.strip().replace("\n  ", " ").splitlines()
        root, shared = first.split(" | ")
        for row in others:
            query, path, nouns, options, prices, own = row.split(" | ")
            low, high = prices.split()
            pools = (pair.replace("~", " ").split("=") for pair in options.split())
            kinds.append(
                Kind(
                    category=category,
                    query=query,
                    path=f"{root} › {path}",
                    nouns=_items(nouns),
                    options={name: _POOLS[pool] for name, pool in pools},
                    low=float(low),
                    high=float(high),
                    attributes=tuple(attribute(name) for name in (*_items(own), *_items(shared))),
                )
            )
    return tuple(kinds), marks


KINDS, MARKS = _read_kinds()

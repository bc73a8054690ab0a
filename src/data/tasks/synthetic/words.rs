//! Words, numbers and prose for generated contexts.
//!
//! Invariant: lists are ASCII, lower case and without repetition.

use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;

/// A sentence that says nothing, RULER's noise.
pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

const ADJECTIVES: &str = "able amber ample ancient arid awake azure bitter blunt bold brave brief bright brisk broad calm careful \
    cheap clever cold common crisp curious damp dark deep dense distant dry dusty eager early easy empty exact faint fair false famous fast \
    fierce firm flat fond fresh frozen gentle giant glad golden grand grave green handy happy harsh heavy hidden hollow honest humble idle \
    inner keen kind large late lean level light little lively lonely long loose loud lucky major mellow mild modest narrow neat noble \
    odd open pale plain polite prime proud pure quick quiet rapid rare ready rich rigid ripe robust rough round royal rural sharp short \
    shy silent silver simple slim slow smooth sober soft solid spare steady steep stiff still strange strict strong subtle sudden sunny \
    sweet swift tall tame tender thick thin tidy tiny tough urban usual vague vast warm weak wide wild wise young";

const NOUNS: &str = "acorn anchor anvil apple arrow atlas badge bakery balcony banner barrel basin basket beacon bell bench berry blanket \
    blossom border bottle boulder branch bridge bucket button cabin cable camera candle canyon carpet castle cavern cedar cellar chapel \
    chimney circle cliff clock cloud coach collar comet compass copper coral corner cottage cotton cradle crater crystal curtain desert \
    diamond dolphin drum eagle ember engine falcon feather fence fern ferry fiddle field flame flint forest fountain garden garnet gate \
    glacier glove grain granite guitar hammer harbor harvest helmet hill hinge island ivory jacket jewel jungle kettle kitten ladder lagoon \
    lantern lemon lighthouse lily lizard locket magnet mantle maple marble market meadow mirror mitten monsoon mountain museum needle nest \
    oasis orchard orchid otter oven paddle palace panther paper parade parrot pebble pencil pepper piano pigeon pillow planet plaza pocket \
    pond poppy prairie pumpkin puzzle quarry rabbit radar rainbow raven ribbon river rocket saddle sail salmon sandal satchel shadow shelter \
    shovel signal sparrow spiral spoon spruce stable stadium station statue stone stream summit sunset swan table temple thicket thunder \
    timber tower trail tunnel turtle umbrella valley velvet village violin wagon walnut warehouse waterfall whistle willow window winter \
    workshop yarn zebra";

/// The nouns.
pub(super) fn nouns() -> Vec<&'static str> {
    NOUNS.split_whitespace().collect()
}

/// `adjective-noun`.
pub(super) fn pair(rng: &mut ChaCha8Rng) -> String {
    let adjectives: Vec<&str> = ADJECTIVES.split_whitespace().collect();
    let pick = |list: &[&'static str], rng: &mut ChaCha8Rng| list.choose(rng).map_or("", |w| w);
    format!("{}-{}", pick(&adjectives, rng), pick(&nouns(), rng))
}

/// `n` different pairs.
pub(super) fn pairs(n: usize, rng: &mut ChaCha8Rng) -> Vec<String> {
    let mut found: Vec<String> = Vec::with_capacity(n);
    while found.len() < n {
        let next = pair(rng);
        if !found.contains(&next) {
            found.push(next);
        }
    }
    found
}

/// A number of `digits` digits, the first one not 0.
pub(super) fn number(digits: u32, rng: &mut ChaCha8Rng) -> String {
    let least = 10u64.pow(digits - 1);
    rng.random_range(least..10 * least).to_string()
}

/// A random UUID of version 4.
pub(super) fn uuid(rng: &mut ChaCha8Rng) -> String {
    let bits: u128 = rng.random();
    let bits = bits & !(0xf << 76) | (4 << 76);
    let bits = bits & !(0b11 << 62) | (0b10 << 62);
    let hex = format!("{bits:032x}");
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    parts.join("-")
}

/// `n` letters.
pub(super) fn letters(n: usize, rng: &mut ChaCha8Rng) -> String {
    (0..n)
        .map(|_| char::from(b'a' + rng.random_range(0..26u8)))
        .collect()
}

/// Shuffled in place.
pub(super) fn shuffle<T>(list: &mut [T], rng: &mut ChaCha8Rng) {
    list.shuffle(rng);
}

/// Sentences of this project's prose, in order.
pub(super) fn prose() -> Vec<String> {
    let bytes = crate::data::manifest::embedded("quickstart/prose.txt").unwrap_or_default();
    let text = String::from_utf8_lossy(bytes);
    let words: Vec<&str> = text.split_whitespace().filter(|w| *w != "\u{c}").collect();
    let mut sentences = Vec::new();
    let mut sentence: Vec<&str> = Vec::new();
    for word in words {
        sentence.push(word);
        let end = word.trim_end_matches(['"', '\'', ')', '”', '’']);
        if end.ends_with(['.', '!', '?']) && sentence.len() > 3 {
            sentences.push(sentence.join(" "));
            sentence.clear();
        }
    }
    if !sentence.is_empty() {
        sentences.push(sentence.join(" "));
    }
    sentences
}

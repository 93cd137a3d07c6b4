//! Translations: the first bytes of a key replaced by others, and the number at its end moved.

use std::ops::Range;

use bytes::Bytes;

use crate::key::range::{KeyRange, successor_of_prefix};

/// Most bytes of a number in a key.
pub(crate) const NUMBER_BYTES_MAX: usize = 8;

/// A translation: the first `strip` bytes of a key are replaced by `prepend`, and the bytes behind
/// them become those that `rest` says.
///
/// It is defined for some keys only: all that start with the same `strip` bytes, if the rest is
/// kept, and else those of one length. The other keys of a range have no image: an edge does not
/// show them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Translation {
    pub(crate) strip: usize,
    pub(crate) prepend: Bytes,
    pub(crate) rest: Rest,
}

/// The bytes of a key behind those that a translation strips.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Rest {
    /// They stay as they are.
    #[default]
    Kept,
    /// They are a big-endian number of `from` bytes, to which `add` is added. The sum has `to`
    /// bytes; `add` is less than 256 to the power of `to`, and higher bytes of the sum are lost.
    /// The range of an edge is such that no key loses more of them than the key before.
    Number { from: u8, to: u8, add: u64 },
    /// No key has an image: two numbers that were moved do not end at one place of a key.
    Nothing,
}

/// The number of up to `len` bytes, as if zeros followed.
fn number(bytes: &[u8], len: usize) -> u64 {
    (0..len).fold(0, |sum, at| {
        sum << 8 | u64::from(bytes.get(at).copied().unwrap_or(0))
    })
}

/// Numbers of `len` bytes are less than this.
fn numbers(len: usize) -> u128 {
    1 << (8 * len)
}

/// The last `len` bytes of a number.
fn cut(number: u64, len: usize) -> u64 {
    match len {
        NUMBER_BYTES_MAX.. => number,
        _ => number & ((1 << (8 * len)) - 1),
    }
}

/// `head`, then the last `len` bytes of a number, then `tail`.
fn with_number(head: &[u8], number: u64, len: usize, tail: &[u8]) -> Bytes {
    let digits = number.to_be_bytes();
    let digits = &digits[NUMBER_BYTES_MAX - len..];
    Bytes::from([head, digits, tail].concat())
}

/// The bytes of `rest` behind a number of `len` bytes.
fn behind_number(rest: &[u8], len: usize) -> &[u8] {
    rest.get(len..).unwrap_or_default()
}

impl Translation {
    pub(crate) fn identity() -> Self {
        Self::default()
    }

    pub(crate) fn is_identity(&self) -> bool {
        self.strip == 0 && self.prepend.is_empty() && self.rest == Rest::Kept
    }

    /// Whether the bytes behind the stripped ones stay as they are.
    pub(crate) fn keeps_rest(&self) -> bool {
        self.rest == Rest::Kept
    }

    /// Replaces the first `strip` bytes by `prepend`.
    pub(crate) fn replacing(strip: usize, prepend: Bytes) -> Self {
        Self {
            strip,
            prepend,
            rest: Rest::Kept,
        }
    }

    pub(crate) fn stripping(strip: usize) -> Self {
        Self::replacing(strip, Bytes::new())
    }

    pub(crate) fn prepending(prepend: Bytes) -> Self {
        Self::replacing(0, prepend)
    }

    /// The keys of `from` and a number of `width` bytes in `numbers`, and the translation to those of
    /// `to` and as many numbers from `first` on. It maps no key if such numbers have more bytes.
    pub(crate) fn of_numbers(
        from: &Bytes,
        wanted: Range<u64>,
        (to, first): (Bytes, u64),
        width: u8,
    ) -> (KeyRange, Self) {
        let len = usize::from(width);
        let count = wanted.end.saturating_sub(wanted.start);
        let end = u128::from(first.max(wanted.start)) + u128::from(count);
        if !(1..=NUMBER_BYTES_MAX).contains(&len) || end > numbers(len) {
            return (KeyRange::all(), Self::nothing());
        }
        if count == 0 {
            return (KeyRange::none(), Self::identity());
        }
        let key = |number| with_number(from, number, len, &[]);
        let hi = match u128::from(wanted.end) < numbers(len) {
            true => Some(key(wanted.end)),
            false => successor_of_prefix(from),
        };
        let there = Self {
            strip: from.len(),
            prepend: to,
            rest: Rest::Number {
                from: width,
                to: width,
                add: cut(first.wrapping_sub(wanted.start), len),
            },
        };
        (KeyRange::new(key(wanted.start), hi), there)
    }

    fn nothing() -> Self {
        Self {
            rest: Rest::Nothing,
            ..Self::default()
        }
    }

    /// The length of the keys that have an image; `None` if keys of all lengths have one.
    pub(crate) fn key_bytes(&self) -> Option<usize> {
        match self.rest {
            Rest::Kept => None,
            Rest::Number { from, .. } => Some(self.strip + usize::from(from)),
            Rest::Nothing => Some(usize::MAX),
        }
    }

    /// Whether a key that starts with the stripped bytes has an image.
    pub(crate) fn maps(&self, key: &[u8]) -> bool {
        self.key_bytes().is_none_or(|len| key.len() == len)
    }

    /// The key on the other side, or the place of a range end there: zeros stand for the bytes that
    /// its number lacks. Requires at least `strip` bytes.
    pub(crate) fn key(&self, key: &Bytes) -> Bytes {
        if self.prepend.is_empty() && self.keeps_rest() {
            return key.slice(self.strip..);
        }
        self.bytes(key)
    }

    /// [`Translation::key`] for a borrowed key.
    pub(crate) fn bytes(&self, key: &[u8]) -> Bytes {
        let rest = &key[self.strip..];
        match self.rest {
            Rest::Kept => Bytes::from([&self.prepend[..], rest].concat()),
            Rest::Number { from, to, add } => {
                let (from, to) = (usize::from(from), usize::from(to));
                let sum = number(rest, from).wrapping_add(add);
                with_number(&self.prepend, sum, to, behind_number(rest, from))
            }
            Rest::Nothing => Bytes::new(),
        }
    }

    /// The image of a range that the translation [`fits`](Self::fits) (law L3). It is empty if no
    /// key of the range has an image.
    pub(crate) fn range(&self, range: &KeyRange) -> KeyRange {
        KeyRange {
            lo: self.key(&range.lo),
            hi: self.hi(&range.lo, range.hi.as_ref()),
        }
    }

    /// The image of the end of a range that begins with `lo`.
    pub(crate) fn hi(&self, lo: &Bytes, hi: Option<&Bytes>) -> Option<Bytes> {
        let prefix = &lo[..self.strip];
        // An end that leaves the prefix is the end of all keys with the prefix.
        let inside = hi.filter(|hi| hi.starts_with(prefix));
        match self.rest {
            Rest::Kept => match inside {
                Some(hi) => Some(self.key(hi)),
                None => successor_of_prefix(&self.prepend),
            },
            Rest::Number { from, to, .. } => {
                let (from, to) = (usize::from(from), usize::from(to));
                let end = self.number_at(lo, inside.map(|hi| &hi[self.strip..]));
                let tail = inside.map_or(&[][..], |hi| behind_number(&hi[self.strip..], from));
                match u64::try_from(end) {
                    Ok(end) if u128::from(end) < numbers(to) => {
                        Some(with_number(&self.prepend, end, to, tail))
                    }
                    _ => successor_of_prefix(&self.prepend),
                }
            }
            Rest::Nothing => Some(Bytes::new()),
        }
    }

    /// The number at the end of the image of a range end, whose bytes behind the stripped ones are
    /// `rest`; without them, of the end of all keys with the stripped bytes. It counts on from the
    /// image of `lo`, and so may be too large for the image.
    fn number_at(&self, lo: &[u8], rest: Option<&[u8]>) -> u128 {
        let Rest::Number { from, to, add } = self.rest else {
            return 0;
        };
        let (from, to) = (usize::from(from), usize::from(to));
        let first = number(&lo[self.strip..], from);
        let end = match rest {
            Some(rest) => u128::from(number(rest, from)),
            None => numbers(from),
        };
        u128::from(cut(first.wrapping_add(add), to)) + end.saturating_sub(first.into())
    }

    /// Whether all keys of a range start with the stripped bytes, and their images are in order.
    pub(crate) fn fits(&self, range: &KeyRange) -> bool {
        if !range.shares_prefix(self.strip) {
            return false;
        }
        let Rest::Number { from, to, .. } = self.rest else {
            return true;
        };
        let prefix = &range.lo[..self.strip];
        let hi = range.hi.as_ref().and_then(|hi| hi.strip_prefix(prefix));
        let end = self.number_at(&range.lo, hi);
        // The range holds the number of an end with more bytes.
        let holds_end = hi.is_some_and(|hi| hi.len() > usize::from(from));
        end + u128::from(holds_end) <= numbers(usize::from(to))
    }

    /// The place before the images of a range that begins with `lo` at which `bound` lies, a key
    /// above the image of `lo`; `None` if it lies behind the images of all keys with the stripped
    /// bytes.
    pub(crate) fn border(&self, lo: &Bytes, bound: &Bytes) -> Option<Bytes> {
        let rest = bound.strip_prefix(&self.prepend[..])?;
        let prefix = &lo[..self.strip];
        let (from, to, add) = match self.rest {
            Rest::Kept if prefix.is_empty() => return Some(bound.slice(self.prepend.len()..)),
            Rest::Kept => return Some(Bytes::from([prefix, rest].concat())),
            Rest::Number { from, to, add } => (usize::from(from), usize::from(to), add),
            Rest::Nothing => return None,
        };
        let first = number(&lo[self.strip..], from);
        let image = cut(first.wrapping_add(add), to);
        let place = u128::from(first) + u128::from(number(rest, to).saturating_sub(image));
        let place = u64::try_from(place).ok()?;
        let is_inside = u128::from(place) < numbers(from);
        is_inside.then(|| with_number(prefix, place, from, behind_number(rest, to)))
    }

    /// Whether all keys of `image`, the image of a range, lie in `whole`. Zeros may stand for the bytes
    /// that the end of `whole` lacks of a number.
    pub(crate) fn leads_into(&self, image: &KeyRange, whole: &KeyRange) -> bool {
        if image.is_empty() || whole.covers(image) {
            return true;
        }
        let Rest::Number { to, .. } = self.rest else {
            return false;
        };
        let len = self.prepend.len() + usize::from(to);
        let end = whole.hi.as_ref().filter(|hi| hi.starts_with(&self.prepend));
        let Some(end) = end.filter(|hi| hi.len() < len) else {
            return false;
        };
        let mut end = end.to_vec();
        end.resize(len, 0);
        KeyRange::new(whole.lo.clone(), Some(end.into())).covers(image)
    }

    /// The part of `range` whose image is `image`, a part of its image.
    pub(crate) fn back(&self, range: &KeyRange, image: &KeyRange) -> KeyRange {
        if image.is_empty() {
            return KeyRange::new(range.lo.clone(), Some(range.lo.clone()));
        }
        // Zeros may have been added to an end of `range`.
        self.inverse(&range.lo).range(image).intersect(range)
    }

    /// First `self`, then `next` (law L1), for a range that `self` fits and whose image `next`
    /// fits. The key `at` lies in that range, or is its begin.
    pub(crate) fn then(&self, next: &Translation, at: &Bytes) -> Translation {
        let strip = self.strip;
        let rest = match (self.rest, next.rest) {
            (Rest::Kept, Rest::Kept) => return self.then_kept(next),
            (Rest::Nothing, _) | (_, Rest::Nothing) => None,
            (Rest::Number { .. }, Rest::Kept) if next.strip < self.prepend.len() => {
                return Self {
                    rest: self.rest,
                    ..self.then_kept(next)
                };
            }
            (Rest::Kept, Rest::Number { .. }) if self.prepend.len() < next.strip => {
                return Self {
                    rest: next.rest,
                    ..self.then_kept(next)
                };
            }
            (Rest::Number { .. }, Rest::Kept) => self.without_digits(next.strip),
            (Rest::Kept, Rest::Number { .. }) => next.behind_digits(&self.prepend),
            (Rest::Number { .. }, Rest::Number { .. }) => self.number_then(next, at),
        };
        match rest {
            Some(rest) => Self {
                strip,
                prepend: next.prepend.clone(),
                rest,
            },
            None => Self::nothing(),
        }
    }

    /// The moved number without the digits that are among the first `strip` bytes of the image;
    /// `None` if these are more than an image has.
    fn without_digits(&self, strip: usize) -> Option<Rest> {
        let Rest::Number { from, to, add } = self.rest else {
            return None;
        };
        let stripped = u8::try_from(strip - self.prepend.len()).ok()?;
        let to = to.checked_sub(stripped)?;
        let add = cut(add, to.into());
        Some(Rest::Number { from, to, add })
    }

    /// The moved number of keys that begin with `known`, of which the last bytes are its first
    /// digits; `None` if these are too many.
    fn behind_digits(&self, known: &[u8]) -> Option<Rest> {
        let Rest::Number { from, to, add } = self.rest else {
            return None;
        };
        let digits = &known[self.strip..];
        let left = from.checked_sub(u8::try_from(digits.len()).ok()?)?;
        let high = match digits.len() {
            0 => 0,
            len => number(digits, len) << (8 * u32::from(left)),
        };
        Some(Rest::Number {
            from: left,
            to,
            add: cut(add.wrapping_add(high), to.into()),
        })
    }

    /// The number that `self` moves, and then `next`; `None` if the two do not end at one place.
    fn number_then(&self, next: &Translation, at: &Bytes) -> Option<Rest> {
        let (
            Rest::Number { from, to: end, .. },
            Rest::Number {
                from: begin, to, ..
            },
        ) = (self.rest, next.rest)
        else {
            return None;
        };
        if self.prepend.len() + usize::from(end) != next.strip + usize::from(begin) {
            return None;
        }
        // Higher digits may have been lost on the way, so the sum of both says too little.
        let image = next.key(&self.key(at));
        let image = number(&image[next.prepend.len()..], to.into());
        let add = image.wrapping_sub(number(&at[self.strip..], from.into()));
        Some(Rest::Number {
            from,
            to,
            add: cut(add, to.into()),
        })
    }

    /// [`Translation::then`], as if both kept the rest.
    fn then_kept(&self, next: &Translation) -> Translation {
        if next.strip > self.prepend.len() {
            return Self::replacing(
                self.strip + next.strip - self.prepend.len(),
                next.prepend.clone(),
            );
        }
        let left = self.prepend.slice(next.strip..);
        let prepend = match next.prepend.is_empty() {
            true => left,
            false => Bytes::from([&next.prepend[..], &left].concat()),
        };
        Self::replacing(self.strip, prepend)
    }

    /// The translation back, for the image of a range that begins with `lo` (law L2).
    pub(crate) fn inverse(&self, lo: &Bytes) -> Translation {
        let rest = match self.rest {
            Rest::Number { from, to, add } => {
                let first = number(&lo[self.strip..], from.into());
                let image = cut(first.wrapping_add(add), to.into());
                Rest::Number {
                    from: to,
                    to: from,
                    add: cut(first.wrapping_sub(image), from.into()),
                }
            }
            rest => rest,
        };
        Translation {
            strip: self.prepend.len(),
            prepend: lo.slice(..self.strip),
            rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// Some bytes, of which most are near a carry.
    fn bytes(rng: &mut StdRng, len: usize) -> Vec<u8> {
        let byte = |rng: &mut StdRng| match rng.random_range(0..4) {
            0 => rng.random(),
            n => [0, 1, 0xff][n - 1],
        };
        (0..len).map(|_| byte(rng)).collect()
    }

    /// A translation of numbers, or now and then one that keeps the rest, with a range that it
    /// fits.
    fn case(rng: &mut StdRng) -> (Translation, KeyRange) {
        loop {
            let (strip, prepend) = (rng.random_range(0..3), rng.random_range(0..3));
            let there = Translation {
                strip,
                prepend: bytes(rng, prepend).into(),
                rest: match rng.random_bool(0.2) {
                    true => Rest::Kept,
                    false => {
                        let to = rng.random_range(0..4);
                        Rest::Number {
                            from: rng.random_range(0..4),
                            to,
                            add: number(&bytes(rng, to.into()), to.into()),
                        }
                    }
                },
            };
            let range = range_of(rng, strip);
            if there.fits(&range) && !range.is_empty() {
                return (there, range);
            }
        }
    }

    /// A range whose keys may share `strip` bytes.
    fn range_of(rng: &mut StdRng, strip: usize) -> KeyRange {
        let prefix = bytes(rng, strip);
        let len = rng.random_range(0..4);
        let lo = [prefix.clone(), bytes(rng, len)].concat();
        let hi = match rng.random_range(0..4) {
            0 => successor_of_prefix(&prefix),
            1 => successor_of_prefix(&lo),
            _ => {
                let len = rng.random_range(0..4);
                Some([prefix, bytes(rng, len)].concat().into())
            }
        };
        KeyRange::new(lo.into(), hi)
    }

    /// A key of the range, at its ends more often than elsewhere.
    fn key_in(rng: &mut StdRng, range: &KeyRange, strip: usize) -> Option<Bytes> {
        let mut key = match rng.random_range(0..3) {
            0 => range.lo.to_vec(),
            1 => range.hi.as_ref().map_or_else(Vec::new, |hi| hi.to_vec()),
            _ => range.lo[..strip].to_vec(),
        };
        key.truncate(rng.random_range(0..=key.len()).max(strip));
        let len = rng.random_range(0..4);
        key.extend(bytes(rng, len));
        range.contains(&key).then(|| key.into())
    }

    /// Laws L1 to L3 for keys that have images, and the order of the images.
    #[test]
    fn translations_of_numbers_keep_the_laws() {
        let (mut mapped, mut composed, mut bordered) = (0, 0, 0);
        for seed in 0..60_000 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (f, range) = case(&mut rng);
            let image = f.range(&range);
            let back = f.inverse(&range.lo);
            let told = || format!("seed {seed}: {f:?} of {range:?}");
            let (g, _) = case(&mut rng);
            let g_fits = !image.is_empty() && g.fits(&image);
            let mut last: Option<(Bytes, Bytes)> = None;
            for _ in 0..20 {
                let Some(key) = key_in(&mut rng, &range, f.strip).filter(|k| f.maps(k)) else {
                    continue;
                };
                mapped += 1;
                let there = f.key(&key);
                assert!(image.contains(&there), "L3 {}: {key:?}", told());
                assert!(back.maps(&there), "L2 {}: {key:?}", told());
                assert_eq!(back.key(&there), key, "L2 {}", told());
                if let Some((k, t)) = &last {
                    assert_eq!(k.cmp(&key), t.cmp(&there), "order {}", told());
                }
                last = Some((key.clone(), there.clone()));
                if g_fits {
                    let both = f.then(&g, &range.lo);
                    let is_mapped = g.maps(&there);
                    composed += usize::from(is_mapped);
                    assert_eq!(both.maps(&key), is_mapped, "L1 {} then {g:?}", told());
                    if is_mapped {
                        assert_eq!(both.key(&key), g.key(&there), "L1 {} then {g:?}", told());
                        assert!(both.fits(&range), "L1 {} then {g:?}", told());
                    }
                }
            }
            // A key of the image comes from a key of the range, and borders divide both alike.
            for _ in 0..20 {
                let Some(bound) = key_in(&mut rng, &image, f.prepend.len()) else {
                    continue;
                };
                if back.maps(&bound) && !f.range(&range).is_empty() {
                    assert!(
                        range.contains(&back.key(&bound)),
                        "L3 {}: {bound:?}",
                        told()
                    );
                }
                let Some((key, there)) = &last else {
                    continue;
                };
                if bound > f.key(&range.lo)
                    && let Some(border) = f.border(&range.lo, &bound)
                {
                    bordered += 1;
                    assert_eq!(*key < border, *there < bound, "{}: {bound:?}", told());
                }
            }
        }
        assert!(mapped > 10_000 && composed > 1_000 && bordered > 1_000);
    }
}

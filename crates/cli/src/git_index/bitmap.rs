//! Bitmaps of git: words of 64 bits, compressed in runs (EWAH).
//!
//! ```text
//! bits (4)  words (4)  word (8 each) ...  place of the last marker (4)     big-endian
//! ```
//!
//! A marker word has a bit, the count of words that consist of it (32 bits), and the count of plain
//! words behind the marker (31 bits).

use super::{Refusal, u32_at};

const WORD_BITS: u64 = 64;

fn damaged<T>() -> Result<T, Refusal> {
    Err(Refusal("a bitmap in it is damaged"))
}

/// Calls `each` with the places of all bits that are set, in their order. Returns the bytes behind
/// the bitmap.
///
/// # Errors
/// For a damaged bitmap, or one with a bit at `end` or behind.
pub fn each_bit<'a>(
    bytes: &'a [u8],
    end: u64,
    each: &mut dyn FnMut(u64),
) -> Result<&'a [u8], Refusal> {
    let len = u32_at(bytes, 4).map_or(usize::MAX, |len| len as usize);
    let words_end = len.saturating_mul(8).saturating_add(8);
    let words = bytes.get(8..words_end);
    let (Some(words), Some(rest)) = (words, bytes.get(words_end.saturating_add(4)..)) else {
        return damaged();
    };
    let (words, _) = words.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_be_bytes(*word));
    let mut at: u64 = 0;
    while let Some(marker) = words.next() {
        let same = ((marker >> 1) & 0xffff_ffff) * WORD_BITS;
        if marker & 1 == 1 {
            if same > end.saturating_sub(at) {
                return damaged();
            }
            (at..at + same).for_each(&mut *each);
        }
        at = at.saturating_add(same);
        for _ in 0..marker >> 33 {
            let Some(word) = words.next() else {
                return damaged();
            };
            let set = (0..WORD_BITS).filter(|bit| word >> bit & 1 == 1);
            for bit in set {
                let place = at.saturating_add(bit);
                if place >= end {
                    return damaged();
                }
                each(place);
            }
            at = at.saturating_add(WORD_BITS);
        }
    }
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bitmap(words: &[u64]) -> Vec<u8> {
        let mut out = vec![0; 4];
        out.extend((words.len() as u32).to_be_bytes());
        words.iter().for_each(|word| out.extend(word.to_be_bytes()));
        out.extend([0; 4]);
        out
    }

    fn bits(bytes: &[u8], end: u64) -> Result<Vec<u64>, Refusal> {
        let mut found = Vec::new();
        each_bit(bytes, end, &mut |bit| found.push(bit)).map(|_| found)
    }

    #[test]
    fn runs_and_plain_words_give_their_bits() {
        let marker = |bit: u64, same: u64, plain: u64| bit | same << 1 | plain << 33;
        let words = [marker(0, 1, 1), 0b101, marker(1, 1, 0)];
        let mut expected = vec![64, 66];
        expected.extend(128..192);
        assert_eq!(bits(&bitmap(&words), 192).unwrap(), expected);
        assert!(bits(&bitmap(&words), 191).is_err(), "a bit behind the end");
        assert!(bits(&bitmap(&[marker(0, 0, 1)]), 64).is_err(), "no word");
        assert!(bits(&bitmap(&[marker(1, 0xffff_ffff, 0)]), 64).is_err());
        assert_eq!(
            bits(&bitmap(&[marker(0, 0xffff_ffff, 0)]), 64),
            Ok(Vec::new())
        );
        let mut many = bitmap(&[]);
        many[4..8].fill(0xff);
        assert!(bits(&many, 64).is_err());
        assert!(bits(&many[..7], 64).is_err());
    }
}

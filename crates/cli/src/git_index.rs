//! The index of a git repository: the cached state of the files of a working tree.
//!
//! ```text
//! "DIRC"  version (4)  count (4)     entries     extensions     checksum (20 or 32)
//!
//! entry:  ctime (8)  mtime (8)  dev (4)  number (4)  mode, uid, gid, size (4 each)
//!         object (20 or 32)  flags (2, 4)  path
//! extension:  name (4)  length (4)  contents
//! ```
//!
//! Integers are big-endian. The path of an entry is as long as the flags say, with 1 to 8 zeros
//! behind it up to a multiple of 8. In version 4 an entry has the count of bytes that the path
//! before loses at its end, and the bytes that come then, with a zero behind them.
//!
//! Only inode numbers are changed, each in its place: entries keep their sizes. Of the extensions
//! some are replaced or dropped ([`Index::with`]), and the others are kept to the byte. Everything
//! is looked at before anything is changed: an index with a version, an extension or bytes that this
//! file does not know is refused.

mod bitmap;

use sha1::{Digest, Sha1};
use sha2::Sha256;

const HEADER_BYTES: usize = 12;
/// Place of the inode number in an entry.
const NUMBER_AT: usize = 20;
/// Bytes of an entry before its object.
const STAT_BYTES: usize = 40;
/// Flag of an entry with two more bytes of flags.
const HAS_MORE_FLAGS: u16 = 0x4000;
/// The length of the path, or that it is at least so long.
const PATH_LEN: u16 = 0xfff;
/// Longest path, in bytes.
const PATH_BYTES_MAX: usize = 4096;

/// The reason for which an index is left as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal(pub &'static str);

type Answer<T = ()> = Result<T, Refusal>;

/// The hash function of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hash {
    Sha1,
    Sha256,
}

impl Hash {
    fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
        }
    }

    fn of(self, parts: &[&[u8]]) -> Vec<u8> {
        fn all<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
            let mut digest = D::new();
            parts.iter().for_each(|part| digest.update(part));
            digest.finalize().to_vec()
        }
        match self {
            Self::Sha1 => all::<Sha1>(parts),
            Self::Sha256 => all::<Sha256>(parts),
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*bytes))
}

/// Reads an integer of variable length, and steps over it.
fn take_varint(bytes: &mut &[u8]) -> Option<usize> {
    let mut value: usize = 0;
    for count in 0.. {
        let (&first, rest) = bytes.split_first()?;
        *bytes = rest;
        if count > 0 {
            value = value.checked_add(1)?.checked_mul(128)?;
        }
        value |= usize::from(first & 127);
        if first & 128 == 0 {
            return Some(value);
        }
    }
    None
}

fn put_varint(out: &mut Vec<u8>, mut value: usize) {
    let mut bytes = vec![(value & 127) as u8];
    while value > 127 {
        value = (value >> 7) - 1;
        bytes.push(128 | (value & 127) as u8);
    }
    out.extend(bytes.iter().rev());
}

/// An extension: its name and the place of its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Extension {
    name: [u8; 4],
    contents: std::ops::Range<usize>,
}

/// An index in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    bytes: Vec<u8>,
    hash: Hash,
    /// The checksum is zeros: git does not look at it.
    is_unchecked: bool,
    /// The place behind the entries.
    entries_end: usize,
    extensions: Vec<Extension>,
}

/// Changes of an index beside its numbers.
#[derive(Clone, Debug, Default)]
pub struct Change<'a> {
    /// The working tree of the cache of untracked files, before and after.
    pub location: Option<(&'a [u8], &'a [u8])>,
    /// The checksum of the shared index that a split index goes on from.
    pub base: Option<&'a [u8]>,
}

impl Index {
    /// Takes the bytes of an index apart.
    ///
    /// # Errors
    /// For an index that this program does not know, or a damaged one.
    pub fn parse(bytes: Vec<u8>) -> Answer<Index> {
        let mut refusal = Refusal("its checksum is wrong");
        let mut unchecked = Vec::new();
        for hash in [Hash::Sha1, Hash::Sha256] {
            let Some(end) = bytes.len().checked_sub(hash.len()) else {
                continue;
            };
            let (front, sum) = bytes.split_at(end);
            let is_unchecked = sum.iter().all(|&byte| byte == 0);
            if !is_unchecked && hash.of(&[front]) != sum {
                continue;
            }
            match Layout::of(front, hash) {
                Ok(layout) if is_unchecked => unchecked.push((hash, layout)),
                Ok(layout) => return Ok(layout.index(bytes, hash, false)),
                Err(why) => refusal = why,
            }
        }
        match (unchecked.pop(), unchecked.pop()) {
            (Some((hash, layout)), None) => Ok(layout.index(bytes, hash, true)),
            (Some(_), Some(_)) => Err(Refusal("nothing tells its hash function")),
            (None, _) => Err(refusal),
        }
    }

    /// Calls `each` with the path of each entry and the place of its number, in their order. An
    /// entry of a split index that replaces another one has an empty path.
    ///
    /// # Errors
    /// Those of `each`.
    pub fn each_entry<E>(
        &self,
        mut each: impl FnMut(&[u8], usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut outcome = Ok(());
        let mut walk = Walk::begin(&self.bytes, self.hash).expect("parsed before");
        while outcome.is_ok() && walk.next().expect("parsed before") {
            outcome = each(&walk.path, walk.entry_at + NUMBER_AT);
        }
        outcome
    }

    /// The low 32 bits of an inode number, at a place of [`Index::each_entry`].
    pub fn number(&self, place: usize) -> u32 {
        u32_at(&self.bytes, place).expect("a place of an entry")
    }

    /// Changes an inode number.
    pub fn set_number(&mut self, place: usize, number: u32) {
        self.bytes[place..place + 4].copy_from_slice(&number.to_be_bytes());
    }

    /// The checksum, in the bytes of the file.
    pub fn checksum(&self) -> &[u8] {
        self.checksum_of(&self.bytes)
    }

    fn contents(&self, name: &[u8; 4]) -> Option<&[u8]> {
        let found = self.extensions.iter().find(|one| one.name == *name)?;
        Some(&self.bytes[found.contents.clone()])
    }

    /// The checksum of the shared index that this one goes on from, if it is split.
    pub fn base(&self) -> Option<&[u8]> {
        let base = self.contents(b"link")?.get(..self.hash.len())?;
        base.iter().any(|&byte| byte != 0).then_some(base)
    }

    /// Calls `each` with the path of each entry of this split index that replaces one of `base`, and
    /// the place of its number.
    ///
    /// # Errors
    /// Those of `each`, and for an index that does not fit `base`.
    pub fn each_replacement<E: From<Refusal>>(
        &self,
        base: &Index,
        mut each: impl FnMut(&[u8], usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let wrong = Refusal("it does not fit its shared index");
        if base.hash != self.hash {
            return Err(wrong.into());
        }
        let count = u64::from(u32_at(&base.bytes, 8).expect("parsed before"));
        let bitmaps = self
            .contents(b"link")
            .and_then(|link| link.get(self.hash.len()..));
        let mut bitmaps = bitmaps.unwrap_or_default();
        let mut replaced = Vec::new();
        if !bitmaps.is_empty() {
            bitmaps = bitmap::each_bit(bitmaps, count, &mut |_| {})?;
            bitmaps = bitmap::each_bit(bitmaps, count, &mut |bit| replaced.push(bit))?;
        }
        let mut places = Vec::new();
        let nameless = |path: &[u8], place| {
            if path.is_empty() {
                places.push(place);
            }
            Ok::<_, Refusal>(())
        };
        self.each_entry(nameless)?;
        if !bitmaps.is_empty() || places.len() != replaced.len() {
            return Err(wrong.into());
        }
        let mut pairs = replaced.into_iter().zip(places).peekable();
        let mut at = 0;
        base.each_entry(|path, _| {
            let found = pairs.next_if(|(bit, _)| *bit == at);
            at += 1;
            found.map_or(Ok(()), |(_, place)| each(path, place))
        })
    }

    /// The bytes of the index with some extensions changed, and with a right checksum. The data of a
    /// file monitor goes: its server watches another tree.
    pub fn with(&self, change: &Change<'_>) -> Vec<u8> {
        let mut out = self.bytes[..self.entries_end].to_vec();
        let mut headers = Vec::new();
        for Extension { name, contents } in &self.extensions {
            let old = &self.bytes[contents.clone()];
            let new = match name {
                b"FSMN" => continue,
                b"UNTR" => change.location.and_then(|both| at_location(old, both)),
                b"link" => change.base.map(|base| [base, &old[base.len()..]].concat()),
                b"EOIE" => {
                    let end = old.get(..4).unwrap_or_default();
                    Some([end, &self.hash.of(&[&headers])].concat())
                }
                _ => None,
            };
            let new = new.as_deref().unwrap_or(old);
            let len = u32::try_from(new.len()).expect("an index is shorter");
            let header = [&name[..], &len.to_be_bytes()].concat();
            out.extend_from_slice(&header);
            out.extend_from_slice(new);
            headers.extend(header);
        }
        let sum = match self.is_unchecked {
            true => vec![0; self.hash.len()],
            false => self.hash.of(&[&out]),
        };
        out.extend(sum);
        out
    }

    /// The checksum in other bytes of this index.
    pub fn checksum_of<'b>(&self, bytes: &'b [u8]) -> &'b [u8] {
        &bytes[bytes.len() - self.hash.len()..]
    }

    /// Whether these are the bytes of the index.
    pub fn is(&self, bytes: &[u8]) -> bool {
        self.bytes == bytes
    }
}

/// The contents of a cache of untracked files for another working tree; `None` if they are of
/// neither.
fn at_location(contents: &[u8], (from, to): (&[u8], &[u8])) -> Option<Vec<u8>> {
    let mut rest = contents;
    let len = take_varint(&mut rest)?;
    let ident = rest.get(..len)?;
    let system = ident.strip_prefix(b"Location ")?.strip_prefix(from)?;
    if !system.starts_with(b", system ") {
        return None;
    }
    let ident = [b"Location ", to, system].concat();
    let mut out = Vec::new();
    put_varint(&mut out, ident.len());
    out.extend(ident);
    out.extend_from_slice(&rest[len..]);
    Some(out)
}

/// The places in an index whose bytes are known.
struct Layout {
    entries_end: usize,
    extensions: Vec<Extension>,
}

impl Layout {
    /// Looks at all entries and extensions of an index without its checksum.
    fn of(bytes: &[u8], hash: Hash) -> Answer<Layout> {
        let mut walk = Walk::begin(bytes, hash)?;
        let mut has_nameless = false;
        while walk.next()? {
            has_nameless |= walk.path.is_empty();
        }
        let mut layout = Layout {
            entries_end: walk.at,
            extensions: Vec::new(),
        };
        let mut at = walk.at;
        while at < bytes.len() {
            let damaged = Refusal("its extensions are damaged");
            let name = bytes.get(at..).and_then(|rest| rest.first_chunk());
            let (name, len) = name.zip(u32_at(bytes, at + 4)).ok_or(damaged)?;
            let contents = at + 8..(at + 8).saturating_add(len as usize);
            if contents.end > bytes.len() {
                return Err(damaged);
            }
            at = contents.end;
            let is_known = name[0].is_ascii_uppercase() || [b"link", b"sdir"].contains(&name);
            if !is_known {
                return Err(Refusal(
                    "it has an extension that this program does not know",
                ));
            }
            let name = *name;
            layout.extensions.push(Extension { name, contents });
        }
        layout.check_link(bytes, hash, has_nameless)?;
        Ok(layout)
    }

    /// Refuses entries without paths in an index that is not split.
    fn check_link(&self, bytes: &[u8], hash: Hash, has_nameless: bool) -> Answer {
        let mut links = self.extensions.iter().filter(|one| one.name == *b"link");
        let link = links.next().map(|one| &bytes[one.contents.clone()]);
        let is_right = match link {
            Some(link) => link.len() >= hash.len() && links.next().is_none(),
            None => !has_nameless,
        };
        match is_right {
            true => Ok(()),
            false => Err(Refusal("its extensions are damaged")),
        }
    }

    fn index(self, bytes: Vec<u8>, hash: Hash, is_unchecked: bool) -> Index {
        Index {
            bytes,
            hash,
            is_unchecked,
            entries_end: self.entries_end,
            extensions: self.extensions,
        }
    }
}

/// Goes through the entries of an index.
struct Walk<'a> {
    bytes: &'a [u8],
    hash: Hash,
    version: u32,
    left: u32,
    at: usize,
    /// The entry that was found last.
    entry_at: usize,
    path: Vec<u8>,
}

impl<'a> Walk<'a> {
    fn begin(bytes: &'a [u8], hash: Hash) -> Answer<Walk<'a>> {
        let fields = u32_at(bytes, 4).zip(u32_at(bytes, 8));
        let Some((version, left)) = fields.filter(|_| bytes.starts_with(b"DIRC")) else {
            return Err(Refusal("it is no index"));
        };
        if !(2..=4).contains(&version) {
            return Err(Refusal("it has a version that this program does not know"));
        }
        Ok(Walk {
            bytes,
            hash,
            version,
            left,
            at: HEADER_BYTES,
            entry_at: HEADER_BYTES,
            path: Vec::new(),
        })
    }

    /// Goes to the next entry, if there is one.
    fn next(&mut self) -> Answer<bool> {
        if self.left == 0 {
            return Ok(false);
        }
        self.left -= 1;
        self.entry_at = self.at;
        match self.take_entry() {
            Some(()) => Ok(true),
            None => Err(Refusal("its entries are damaged")),
        }
    }

    fn take_entry(&mut self) -> Option<()> {
        let flags_at = self.at + STAT_BYTES + self.hash.len();
        let flags = self.bytes.get(flags_at..flags_at + 2)?;
        let flags = u16::from_be_bytes(flags.try_into().expect("two bytes"));
        let has_more = flags & HAS_MORE_FLAGS != 0;
        if has_more && self.version < 3 {
            return None;
        }
        let path_at = flags_at + if has_more { 4 } else { 2 };
        let mut rest = self.bytes.get(path_at..)?;
        let mut kept = 0;
        if self.version == 4 {
            kept = self.path.len().checked_sub(take_varint(&mut rest)?)?;
        }
        let told = usize::from(flags & PATH_LEN);
        let is_long = told == usize::from(PATH_LEN);
        let new = match self.version {
            2 | 3 if !is_long => rest.get(..told)?,
            // The zero lies near: paths are short.
            _ => {
                let near = &rest[..rest.len().min(PATH_BYTES_MAX + 1)];
                &near[..near.iter().position(|&byte| byte == 0)?]
            }
        };
        self.path.truncate(kept);
        self.path.extend_from_slice(new);
        let len = self.path.len();
        let is_right = if is_long { len >= told } else { len == told };
        if !is_right || len > PATH_BYTES_MAX || new.contains(&0) {
            return None;
        }
        let behind = self.bytes.len() - rest.len() + new.len();
        self.at = match self.version {
            4 => behind + 1,
            _ => self.at + (behind - self.at + 8) / 8 * 8,
        };
        let zeros = self.bytes.get(behind..self.at)?;
        zeros.iter().all(|&byte| byte == 0).then_some(())
    }
}

#[cfg(test)]
mod tests;

//! The key space: how paths, blocks, attributes and links become keys of the tree.
//!
//! A *path* `P` is the part of a key that names an object. `P(root)` is empty and
//!
//! ```text
//! P(child `name` of D)     = P(D) 00 02 name
//! P(shared inode `n` of C) = P(C) 00 05 n      a file with several names, see below
//! P(orphan `ino`)          =      00 07 ino    an object without a name
//! ```
//!
//! Names hold neither NUL nor `/`, so the NUL in front of every tag ends a name and sorts before
//! any longer one: a directory's own keys are consecutive, entries first, before its descendants.
//! The first byte of a key is its index, 01 for metadata and 02 for data:
//!
//! ```text
//! 01 00 00                       record of the root
//! 01 P(D) 00 01 name             entry of D: an inode record, a link entry, a deleted entry
//! 02 P(X) 00 03 n                block n of a file
//! 02 P(X) 00 0A c                chunk c of the allocation map of a sparse file
//! 01 P(X) 00 04 name             extended attribute
//! 01 P(C) 00 05 n                record of a shared inode
//! 01 P(C) 00 06 dir 00 01 name   link index: link entries below C, dir = P(its directory) - P(C)
//! 01 00 08 name                  counters of the volume
//! 01 00 09 n, 02 00 09 n         stage of one batch, n below 2; empty before and after the batch
//! 01 00 0F 00 ino                protection of the inode with this visible number
//! 01 00 0F 01 ino                count of protected inodes below the directory with this number
//! ```
//!
//! Numbers are big-endian `u64` so that they sort. The *range of X* in an index is the set of keys
//! that start with `index P(X) 00`: all keys in or below X. The record of X itself is outside of
//! it, with X's siblings. That is why a clone or a rename of X moves two ranges and writes one
//! record.

use crate::format::ino::Ino;
use bytes::Bytes;

/// Index of metadata.
pub(crate) const META: u8 = 1;
/// Index of data.
pub(crate) const DATA: u8 = 2;

const ROOT: u8 = 0;
const ENTRY: u8 = 1;
const CHILD: u8 = 2;
const BLOCK: u8 = 3;
const XATTR: u8 = 4;
const SHARED: u8 = 5;
const LINK: u8 = 6;
const ORPHAN: u8 = 7;
const COUNTER: u8 = 8;
const STAGE: u8 = 9;
const MAP: u8 = 10;
const PROTECTED: u8 = 15;

/// Tags of the root's range that belong to the volume and not to the tree of files: a clone of
/// the root leaves them out.
pub(crate) const VOLUME_TAGS: [u8; 5] = [ROOT, ORPHAN, COUNTER, STAGE, PROTECTED];

fn join(parts: &[&[u8]]) -> Bytes {
    let mut key = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    for part in parts {
        key.extend_from_slice(part);
    }
    key.into()
}

/// Path of `name` in the directory at `dir`.
pub(crate) fn child(dir: &[u8], name: &[u8]) -> Bytes {
    join(&[dir, &[0, CHILD], name])
}

/// Turns the path of a directory into that of `name` in it.
pub(crate) fn push_child(path: &mut Vec<u8>, name: &[u8]) {
    path.extend_from_slice(&[0, CHILD]);
    path.extend_from_slice(name);
}

/// The names that lead from the directory at `from` to the one at `to` below it.
pub(crate) fn names_between<'a>(from: &[u8], to: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    to[from.len()..]
        .split(|&byte| byte == 0)
        .skip(1)
        .map(|tagged| tagged.strip_prefix(&[CHILD]).unwrap_or(tagged))
}

/// The directory and the last name of a path that ends with a name.
pub(crate) fn split_child(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let zero = path.iter().rposition(|&byte| byte == 0)?;
    let name = path[zero..].strip_prefix(&[0, CHILD])?;
    Some((&path[..zero], name))
}

/// The subject of a key, beside the path that the key starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A name in the directory.
    Entry(&'a [u8]),
    /// A block of the file.
    Block,
    /// A chunk of the allocation map of the file.
    Map,
    /// An extended attribute of the object.
    Xattr,
    /// A shared inode of the clone root: its record, blocks or attributes.
    Shared(u64),
    /// The link index of the clone root.
    Link,
    /// The volume, or a subject that this version does not know.
    Volume,
}

/// The path that `key` starts with, relative to an object, and the subject of the key. `key` is the
/// rest of a key behind [`range`] of that object.
pub(crate) fn parse_below(key: &[u8]) -> (Bytes, Part<'_>) {
    let mut at = 0;
    // `key` lacks the NUL in front of its first tag.
    while key.get(at) == Some(&CHILD) {
        match key[at..].iter().position(|&byte| byte == 0) {
            Some(len) => at += len + 1,
            None => return (join(&[&[0], key]), Part::Volume),
        }
    }
    let path = if at == 0 {
        Bytes::new()
    } else {
        join(&[&[0], &key[..at - 1]])
    };
    let rest = key.get(at + 1..).unwrap_or_default();
    let part = match key.get(at) {
        Some(&ENTRY) => Part::Entry(rest),
        Some(&BLOCK) => Part::Block,
        Some(&MAP) => Part::Map,
        Some(&XATTR) => Part::Xattr,
        Some(&SHARED) => match rest.first_chunk() {
            Some(link) => Part::Shared(u64::from_be_bytes(*link)),
            None => Part::Volume,
        },
        Some(&LINK) => Part::Link,
        _ => Part::Volume,
    };
    (path, part)
}

/// The end of the keys in and below the object at the relative path `object`, in the form that
/// [`parse_below`] takes.
pub(crate) fn end_below(object: &[u8]) -> Bytes {
    match object.split_first() {
        Some((_, object)) => join(&[object, &[1]]),
        None => Bytes::from_static(&[0xff]),
    }
}

/// The end of the link index of the clone root at the relative path `root`, in the form that
/// [`parse_below`] takes.
pub(crate) fn end_of_links_below(root: &[u8]) -> Bytes {
    let end = join(&[root, &[0, LINK + 1]]);
    end.slice(1..)
}

/// Directory and name of a link entry, from its key in the index of the clone root at `root`.
pub(crate) fn link_name(root: &[u8], key: &[u8]) -> Option<(Bytes, Bytes)> {
    let tail = key.strip_prefix(&link_index(root)[..])?;
    let zero = tail.iter().rposition(|&byte| byte == 0)?;
    let name = tail[zero..].strip_prefix(&[0, ENTRY])?;
    Some((join(&[root, &tail[..zero]]), Bytes::copy_from_slice(name)))
}

/// Path of shared inode `link` of the clone root at `root`.
pub(crate) fn shared_inode(root: &[u8], link: u64) -> Bytes {
    join(&[root, &[0, SHARED], &link.to_be_bytes()])
}

/// Path of an open file without a name.
pub(crate) fn orphan(ino: Ino) -> Bytes {
    join(&[&[0, ORPHAN], &ino.0.to_be_bytes()])
}

/// Path of a stage, where parts of a structural change wait within one batch; `number` is below 2.
pub(crate) fn stage(number: u8) -> Bytes {
    join(&[&[0, STAGE, number]])
}

/// Key of the root's record.
pub(crate) fn root_record() -> Bytes {
    Bytes::from_static(&[META, 0, ROOT])
}

/// Key of a counter of the volume.
pub(crate) fn counter(name: &[u8]) -> Bytes {
    join(&[&[META, 0, COUNTER], name])
}

/// Prefix of the keys about protected inodes; a byte and the number of an inode follow.
pub(crate) fn protections() -> Bytes {
    join(&[&[META, 0, PROTECTED]])
}

/// Key of the protection of the inode with this visible number.
pub(crate) fn protection(ino: Ino) -> Bytes {
    join(&[&[META, 0, PROTECTED, 0], &ino.0.to_be_bytes()])
}

/// Key of the count of protected inodes below the directory with this visible number.
pub(crate) fn protected_below(ino: Ino) -> Bytes {
    join(&[&[META, 0, PROTECTED, 1], &ino.0.to_be_bytes()])
}

/// Key of the entry `name` of the directory at `dir`.
pub(crate) fn entry(dir: &[u8], name: &[u8]) -> Bytes {
    join(&[&[META], dir, &[0, ENTRY], name])
}

/// Prefix of the entries of the directory at `dir`; a name follows.
pub(crate) fn entries(dir: &[u8]) -> Bytes {
    entry(dir, b"")
}

/// Key of the record of the shared inode at `path`.
pub(crate) fn shared_record(path: &[u8]) -> Bytes {
    join(&[&[META], path])
}

/// Prefix of the shared inodes of the clone root at `root`, in either index.
pub(crate) fn shared_inodes(index: u8, root: &[u8]) -> Bytes {
    join(&[&[index], root, &[0, SHARED]])
}

/// Prefix of the link index of the clone root at `root`.
pub(crate) fn link_index(root: &[u8]) -> Bytes {
    join(&[&[META], root, &[0, LINK]])
}

/// Prefix of all keys in or below the object at `path`.
pub(crate) fn range(index: u8, path: &[u8]) -> Bytes {
    join(&[&[index], path, &[0]])
}

/// Prefix of the keys of the root's range with this tag, moved to `path`.
pub(crate) fn tagged(index: u8, path: &[u8], tag: u8) -> Bytes {
    join(&[&[index], path, &[0, tag]])
}

/// Whether the object at `path` lies in the range of the one at `ancestor`.
pub(crate) fn is_below(path: &[u8], ancestor: &[u8]) -> bool {
    path.strip_prefix(ancestor)
        .is_some_and(|rest| rest.first() == Some(&0))
}

/// Prefix of the blocks of the file at `path`; the number follows.
pub(crate) fn blocks(path: &[u8]) -> Bytes {
    join(&[&[DATA], path, &[0, BLOCK]])
}

/// Key of a block, from the prefix that [`blocks`] gave.
pub(crate) fn block(blocks: &[u8], number: u64) -> Bytes {
    join(&[blocks, &number.to_be_bytes()])
}

/// Number of the block with this key, from the prefix that [`blocks`] gave.
pub(crate) fn block_number(blocks: &[u8], key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(
        key.strip_prefix(blocks)?.try_into().ok()?,
    ))
}

/// Prefix of the chunks of the allocation map of the file at `path`; the number follows.
pub(crate) fn map(path: &[u8]) -> Bytes {
    join(&[&[DATA], path, &[0, MAP]])
}

/// Key of a chunk, from the prefix that [`map`] gave.
pub(crate) fn chunk(map: &[u8], number: u64) -> Bytes {
    block(map, number)
}

/// The key in the range of the object at `path` that ends with `rest`.
pub(crate) fn in_range(index: u8, path: &[u8], rest: &[u8]) -> Bytes {
    join(&[&[index], path, &[0], rest])
}

/// Key of an extended attribute. With an empty name it is the prefix of all attributes of the
/// object.
pub(crate) fn xattr(path: &[u8], name: &[u8]) -> Bytes {
    join(&[&[META], path, &[0, XATTR], name])
}

/// Key in the link index of the clone root at `root` for `name` in the directory at `dir`.
pub(crate) fn link(root: &[u8], dir: &[u8], name: &[u8]) -> Bytes {
    join(&[
        &[META],
        root,
        &[0, LINK],
        &dir[root.len()..],
        &[0, ENTRY],
        name,
    ])
}

/// Prefix of the index keys of all link entries in and below the directory at `dir`.
pub(crate) fn links_below(root: &[u8], dir: &[u8]) -> Bytes {
    join(&[&[META], root, &[0, LINK], &dir[root.len()..], &[0]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_and_its_descendants_are_one_range_whatever_the_names() {
        let names: [&[u8]; 6] = [b"\x01", b"a", b"a\x01", b"ab", b"a\xff", b"\xff\xff"];
        for outer in names {
            let path = child(b"", outer);
            let range_of = range(META, &path);
            for inner in names {
                let inside = child(&path, inner);
                assert!(is_below(&inside, &path) && !is_below(&path, &inside));
                for key in [
                    entry(&path, inner),
                    xattr(&path, inner),
                    entry(&inside, b"x"),
                    shared_record(&shared_inode(&path, 1)),
                ] {
                    assert!(key.starts_with(&range_of), "{key:?}");
                    assert!(entries(&path) <= key);
                }
                if inner != outer {
                    assert!(!is_below(&child(b"", inner), &path));
                    assert!(!entry(b"", inner).starts_with(&range_of));
                    assert!(!entry(&child(b"", inner), b"x").starts_with(&range_of));
                }
            }
            assert!(!entry(b"", outer).starts_with(&range_of));
        }
    }

    #[test]
    fn entries_sort_by_name_and_before_deeper_keys() {
        let dir = child(b"", b"d");
        let keys = [
            entry(&dir, b"\x01"),
            entry(&dir, b"\xff"),
            entry(&child(&dir, b"\x01"), b"x"),
            xattr(&dir, b"user.x"),
            shared_record(&shared_inode(&dir, 0)),
            link(&dir, &dir, b"x"),
        ];
        assert!(keys.is_sorted());
    }

    #[test]
    fn link_entries_below_a_directory_are_one_prefix() {
        let (root, sibling) = (child(b"", b"r"), child(&child(b"", b"r"), b"d\x01"));
        let dir = child(&root, b"d");
        let below = links_below(&root, &dir);
        assert!(link(&root, &dir, b"x").starts_with(&below));
        assert!(link(&root, &child(&dir, b"e"), b"x").starts_with(&below));
        assert!(!link(&root, &root, b"d").starts_with(&below));
        assert!(!link(&root, &sibling, b"x").starts_with(&below));
    }

    #[test]
    fn link_keys_tell_directory_and_name() {
        let root = child(b"", b"r");
        let mut dir = root.to_vec();
        for names in [&[][..], &[&b"d"[..]], &[b"\x02", b"\x01\xff"]] {
            dir.truncate(root.len());
            names.iter().for_each(|name| push_child(&mut dir, name));
            let told = link_name(&root, &link(&root, &dir, b"x"));
            assert_eq!(told, Some((dir.clone().into(), Bytes::from_static(b"x"))));
            assert_eq!(names_between(&root, &dir).collect::<Vec<_>>(), names);
        }
    }

    #[test]
    fn keys_below_an_object_are_taken_apart() {
        let top = child(b"", b"top");
        let paths = [
            Bytes::new(),
            child(b"", b"d"),
            child(&child(b"", b"\x01"), b"\xff"),
        ];
        for relative in &paths {
            let path = join(&[&top, relative]);
            let cases: [(Bytes, Part<'_>); 7] = [
                (entry(&path, b"x\x02"), Part::Entry(b"x\x02")),
                (block(&blocks(&path), 256), Part::Block),
                (chunk(&map(&path), 256), Part::Map),
                (xattr(&path, b"user.a"), Part::Xattr),
                (
                    shared_record(&shared_inode(&path, 1 << 40)),
                    Part::Shared(1 << 40),
                ),
                (blocks(&shared_inode(&path, 7)), Part::Shared(7)),
                (link(&path, &child(&path, b"e"), b"x"), Part::Link),
            ];
            for (key, part) in cases {
                let index = key[0];
                let told = key.strip_prefix(&range(index, &top)[..]).unwrap();
                assert_eq!(parse_below(told), (relative.clone(), part));
                assert!(told < &end_below(relative)[..]);
                assert_eq!(part == Part::Link, {
                    let end = end_of_links_below(relative);
                    told < &end[..]
                        && told >= &end_of_links_below(relative)[..end.len() - 1]
                        && told[end.len() - 1] == LINK
                });
            }
            let split = split_child(relative).map(|(dir, name)| child(dir, name));
            assert_eq!(split.unwrap_or_default(), *relative);
        }
        let (dir, sibling) = (child(b"", b"d"), child(b"", b"d\x01"));
        let below = |path: &[u8]| entry(path, b"x").slice(2..);
        assert!(below(&dir) < end_below(&dir) && end_below(&dir) <= below(&sibling));
        // Arbitrary bytes cause no panic.
        for key in [
            &b""[..],
            b"\x02",
            b"\x02abc",
            b"\x05abc",
            b"\xff",
            b"\x02a\0",
        ] {
            parse_below(key);
        }
    }

    #[test]
    fn keys_are_pinned() {
        let dir = child(b"", b"d");
        assert_eq!(entry(&dir, b"f")[..], *b"\x01\0\x02d\0\x01f");
        assert_eq!(
            block(&blocks(&child(&dir, b"f")), 258)[..],
            *b"\x02\0\x02d\0\x02f\0\x03\0\0\0\0\0\0\x01\x02"
        );
        assert_eq!(
            chunk(&map(&child(&dir, b"f")), 258)[..],
            *b"\x02\0\x02d\0\x02f\0\x0a\0\0\0\0\0\0\x01\x02"
        );
        assert_eq!(link(b"", &dir, b"f")[..], *b"\x01\0\x06\0\x02d\0\x01f");
        assert_eq!(
            shared_record(&shared_inode(b"", 7))[..],
            *b"\x01\0\x05\0\0\0\0\0\0\0\x07"
        );
        assert_eq!(
            block_number(&blocks(&dir), &block(&blocks(&dir), 9)),
            Some(9)
        );
    }
}

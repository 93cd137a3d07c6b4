//! Records of the node table and their keys.
//!
//! ```text
//! key 01 | node u64 BE        record:             fixed part, then child bytes
//! key 01 | node u64 BE | n    n-th continuation (1..=255) of child bytes that do not fit
//! key 02 | node u64 BE        zombie:             empty value
//! key 03                      counters and root:  see `Meta`. Behind the newest nodes: a commit
//!                             changes their page in any case
//!
//! fixed part: kind u8, height varint, addr/4096 varint, len/4096 varint, used varint,
//!             checksum u64, refs varint, children varint, child bytes varint
//!             kind + 128 says that the node is kept twice: addr/4096 of its second copy, varint,
//!             follows the length
//!             kind + 64 says that the node is a guest: its offset, varint, follows the length
//! child bytes: per child the signed varint of its difference to the child before (first: to 0)
//! ```

use ramet_block::{BLOCK_BYTES, DecodeError, Extent, Reader, Writer};

use crate::error::{Error, Result};
use crate::page::{Shape, Structure};

pub(crate) const SHAPE: Shape = Shape::new(Structure::NodeTable, 8192);

/// Fixed parts are at most this long: a byte, a u64, a height, and seven varints, of which those
/// that count blocks are shorter than ten bytes.
const FIXED_MAX: usize = 1 + 8 + 5 + 66;
const PIECE_MAX: usize = SHAPE.value_max() - FIXED_MAX;
const PIECES_MAX: usize = 255;

// Part of the format: where a child list is cut.
const _: () = assert!(PIECE_MAX == 1895);

/// Added to the kind of a node that is kept twice.
const KEPT_TWICE: u8 = 128;
/// Added to the kind of a guest.
const GUEST: u8 = 64;

const RECORD: &str = "node record";
const META_KEY: [u8; 1] = [3];

/// Number of a node. Numbers are never used twice; 0 is never used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// The kind of a node, with its number on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum NodeKind {
    /// Basement nodes full of keys and values.
    Leaf = 1,
    /// A sorted run of messages.
    Segment = 2,
    /// Pivots, edges and segment references of an interior node.
    Skeleton = 3,
}

impl NodeKind {
    fn from_tag(tag: u8) -> Result<Self, DecodeError> {
        match tag {
            1 => Ok(Self::Leaf),
            2 => Ok(Self::Segment),
            3 => Ok(Self::Skeleton),
            _ => Err(DecodeError::Value {
                field: "node kind",
                found: tag.into(),
            }),
        }
    }
}

/// The table's record of a node.
///
/// A node owns its extent, but for a *guest*: a guest lies in the extent of its *carrier*, a node that
/// it names. So the carrier lives as long as its guest, and the extent is free when the carrier has gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// Where its bytes are.
    pub extent: Extent,
    /// Bytes of the extent before those of the node: 0 but for a guest.
    pub offset: u32,
    /// First byte of its second copy, as long as the extent, if it is kept twice.
    pub copy: Option<u64>,
    /// How many bytes of the extent are in use.
    pub used_bytes: u32,
    /// Checksum of those bytes, as the writer of the node defines it.
    pub checksum: u64,
    /// Its kind.
    pub kind: NodeKind,
    /// Its height label.
    pub height: u32,
    /// References to it from child lists and from the root. 0 for a zombie.
    pub refs: u64,
    /// Nodes it names; one entry per reference, so a node may repeat.
    pub children: Vec<NodeId>,
}

/// A node that a commit adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewNode {
    /// Its number, never used before.
    pub id: NodeId,
    /// Where its bytes are; allocated by this table and written by the caller.
    pub extent: Extent,
    /// Bytes of the extent before those of the node: 0 but for a guest.
    pub offset: u32,
    /// First byte of its second copy, as long as the extent, if it is kept twice; likewise.
    pub copy: Option<u64>,
    /// How many bytes of the extent are in use.
    pub used_bytes: u32,
    /// Checksum of those bytes.
    pub checksum: u64,
    /// Its kind.
    pub kind: NodeKind,
    /// Its height label.
    pub height: u32,
    /// Nodes it names, one entry per reference.
    pub children: Vec<NodeId>,
}

impl NodeRecord {
    /// The extents that it owns, that of the first copy first; none of a guest.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<> {
        owned(self.extent, self.offset, self.copy)
    }

    /// Bytes of the extent that it owns, of one copy; 0 for a guest.
    pub fn owned_bytes(&self) -> u64 {
        owned_bytes(self.extent, self.offset)
    }
}

impl NewNode {
    /// The extents that it owns, that of the first copy first; none of a guest.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<> {
        owned(self.extent, self.offset, self.copy)
    }

    /// Bytes of the extent that it owns, of one copy; 0 for a guest.
    pub fn owned_bytes(&self) -> u64 {
        owned_bytes(self.extent, self.offset)
    }
}

fn owned(extent: Extent, offset: u32, copy: Option<u64>) -> impl Iterator<Item = Extent> {
    let copy = copy.map(|addr| Extent::new(addr, extent.len));
    let first = (offset == 0).then_some(extent);
    [first, copy].into_iter().flatten()
}

fn owned_bytes(extent: Extent, offset: u32) -> u64 {
    if offset == 0 { extent.len } else { 0 }
}

fn key(space: u8, id: NodeId) -> [u8; 9] {
    let mut key = [space; 9];
    key[1..].copy_from_slice(&id.0.to_be_bytes());
    key
}

pub(crate) fn record_key(id: NodeId) -> [u8; 9] {
    key(1, id)
}

pub(crate) fn zombie_key(id: NodeId) -> [u8; 9] {
    key(2, id)
}

pub(crate) fn piece_key(id: NodeId, piece: u8) -> [u8; 10] {
    let mut key = [piece; 10];
    key[..9].copy_from_slice(&record_key(id));
    key
}

/// The meaning of a key of the node table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Meta,
    Record(NodeId),
    Piece(NodeId, u8),
    Zombie(NodeId),
}

pub(crate) fn parse_key(key: &[u8]) -> Result<KeyKind> {
    let id = |bytes: &[u8]| {
        <[u8; 8]>::try_from(bytes)
            .ok()
            .map(|bytes| NodeId(u64::from_be_bytes(bytes)))
    };
    let kind = match key {
        [1, rest @ ..] if rest.len() == 8 => id(rest).map(KeyKind::Record),
        [1, rest @ .., piece] => id(rest).map(|id| KeyKind::Piece(id, *piece)),
        [2, rest @ ..] => id(rest).map(KeyKind::Zombie),
        [3] => Some(KeyKind::Meta),
        _ => None,
    };
    kind.ok_or_else(|| Error::corrupt("node table", 0, format!("unknown key {key:02x?}")))
}

/// The fixed part of a record and the child bytes beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub extent: Extent,
    pub offset: u32,
    pub copy: Option<u64>,
    pub used_bytes: u32,
    pub checksum: u64,
    pub kind: NodeKind,
    pub height: u32,
    pub refs: u64,
    child_count: u64,
    child_bytes: usize,
    first_piece: Vec<u8>,
}

impl Head {
    /// Splits a new node into its head and the continuations of its child bytes.
    pub fn of(node: &NewNode, refs: u64) -> Result<(Self, Vec<Vec<u8>>)> {
        let mut w = Writer::with_capacity(node.children.len() * 3);
        let mut last = 0u64;
        for child in &node.children {
            w.signed(child.0.wrapping_sub(last) as i64);
            last = child.0;
        }
        let bytes = w.into_vec();
        let max = PIECE_MAX * PIECES_MAX;
        if bytes.len() > max {
            return Err(Error::TooLong {
                what: "child list",
                len: bytes.len(),
                max,
            });
        }
        let mut pieces = bytes.chunks(PIECE_MAX).map(<[u8]>::to_vec);
        let first_piece = pieces.next().unwrap_or_default();
        let pieces = pieces.collect();
        let head = Self {
            extent: node.extent,
            offset: node.offset,
            copy: node.copy,
            used_bytes: node.used_bytes,
            checksum: node.checksum,
            kind: node.kind,
            height: node.height,
            refs,
            child_count: node.children.len() as u64,
            child_bytes: bytes.len(),
            first_piece,
        };
        Ok((head, pieces))
    }

    /// The extents that it owns, that of the first copy first; none of a guest.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<> {
        owned(self.extent, self.offset, self.copy)
    }

    /// Whether a guest may lie at `offset` of `extent`.
    pub fn carries(&self, extent: Extent, offset: u32) -> bool {
        self.offset == 0 && self.extent == extent && self.used_bytes <= offset
    }

    /// How many continuations the record has.
    pub fn pieces(&self) -> u8 {
        u8::try_from(self.child_bytes.div_ceil(PIECE_MAX).saturating_sub(1))
            .expect("checked by `of` and `decode`")
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::with_capacity(FIXED_MAX + self.first_piece.len());
        let twice = if self.copy.is_some() { KEPT_TWICE } else { 0 };
        let guest = if self.offset > 0 { GUEST } else { 0 };
        w.u8(self.kind as u8 | twice | guest);
        w.varint(self.height.into());
        w.varint(self.extent.addr / BLOCK_BYTES);
        w.varint(self.extent.len / BLOCK_BYTES);
        if let Some(copy) = self.copy {
            w.varint(copy / BLOCK_BYTES);
        }
        if self.offset > 0 {
            w.varint(self.offset.into());
        }
        w.varint(self.used_bytes.into());
        w.u64(self.checksum);
        w.varint(self.refs);
        w.varint(self.child_count);
        w.varint(self.child_bytes as u64);
        w.raw(&self.first_piece);
        w.into_vec()
    }

    pub fn decode(id: NodeId, bytes: &[u8], usable: Extent) -> Result<Self> {
        let malformed = Error::malformed(RECORD, id.0);
        let head = Self::decode_fields(bytes).map_err(&malformed)?;
        for extent in [head.extent].into_iter().chain(head.extents()) {
            extent
                .validate(usable)
                .map_err(Error::extent(RECORD, id.0))?;
        }
        let first = head.child_bytes.min(PIECE_MAX);
        let sane = head.child_bytes <= PIECE_MAX * PIECES_MAX
            && head.child_count <= head.child_bytes as u64
            && head.first_piece.len() == first
            && u64::from(head.offset) + u64::from(head.used_bytes) <= head.extent.len;
        if !sane {
            return Err(Error::corrupt(
                RECORD,
                id.0,
                "lengths contradict each other",
            ));
        }
        Ok(head)
    }

    fn decode_fields(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let tag = r.u8()?;
        let kind = NodeKind::from_tag(tag & !(KEPT_TWICE | GUEST))?;
        if tag & KEPT_TWICE != 0 && tag & GUEST != 0 {
            return Err(DecodeError::Value {
                field: "node kind",
                found: tag.into(),
            });
        }
        let short = |len: u64| {
            let max = u32::MAX.into();
            u32::try_from(len).map_err(|_| DecodeError::TooLong { len, max })
        };
        let height = short(r.varint()?)?;
        let mut blocks = || {
            let blocks = r.varint()?;
            let too_long = DecodeError::TooLong {
                len: blocks,
                max: u64::MAX / BLOCK_BYTES,
            };
            blocks.checked_mul(BLOCK_BYTES).ok_or(too_long)
        };
        let extent = Extent::new(blocks()?, blocks()?);
        let copy = (tag & KEPT_TWICE != 0).then(&mut blocks).transpose()?;
        let offset = match tag & GUEST {
            0 => 0,
            _ => match short(r.varint()?)? {
                0 => {
                    return Err(DecodeError::Value {
                        field: "offset of a guest",
                        found: 0,
                    });
                }
                offset => offset,
            },
        };
        let used_bytes = short(r.varint()?)?;
        let checksum = r.u64()?;
        let refs = r.varint()?;
        let child_count = r.varint()?;
        let child_bytes = r.varint()?;
        let child_bytes = usize::try_from(child_bytes).map_err(|_| DecodeError::TooLong {
            len: child_bytes,
            max: usize::MAX as u64,
        })?;
        let first_piece = r.take(r.remaining())?.to_vec();
        Ok(Self {
            extent,
            offset,
            copy,
            used_bytes,
            checksum,
            kind,
            height,
            refs,
            child_count,
            child_bytes,
            first_piece,
        })
    }

    /// The record as if the node named no other.
    pub fn without_children(&self) -> NodeRecord {
        NodeRecord {
            extent: self.extent,
            offset: self.offset,
            copy: self.copy,
            used_bytes: self.used_bytes,
            checksum: self.checksum,
            kind: self.kind,
            height: self.height,
            refs: self.refs,
            children: Vec::new(),
        }
    }

    /// The whole record, given the continuations.
    pub fn into_record(self, id: NodeId, pieces: &[Box<[u8]>]) -> Result<NodeRecord> {
        let mut bytes = self.first_piece;
        pieces
            .iter()
            .for_each(|piece| bytes.extend_from_slice(piece));
        if bytes.len() != self.child_bytes {
            return Err(Error::corrupt(RECORD, id.0, "child bytes are missing"));
        }
        let mut r = Reader::new(&bytes);
        // `child_count` is at most `child_bytes`, so a forged count reserves no absurd memory.
        let mut children = Vec::with_capacity(self.child_count as usize);
        let mut last = 0u64;
        for _ in 0..self.child_count {
            last = last.wrapping_add(r.signed().map_err(Error::malformed(RECORD, id.0))? as u64);
            children.push(NodeId(last));
        }
        r.finish().map_err(Error::malformed(RECORD, id.0))?;
        Ok(NodeRecord {
            extent: self.extent,
            offset: self.offset,
            copy: self.copy,
            used_bytes: self.used_bytes,
            checksum: self.checksum,
            kind: self.kind,
            height: self.height,
            refs: self.refs,
            children,
        })
    }
}

/// Root and counters, kept in the table so that `stats` never has to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Meta {
    /// Root node, 0 for none.
    pub root: u64,
    pub leaves: u64,
    pub segments: u64,
    pub skeletons: u64,
    /// Bytes of all nodes' extents.
    pub node_bytes: u64,
}

impl Meta {
    pub const KEY: [u8; 1] = META_KEY;

    pub fn counter(&mut self, kind: NodeKind) -> &mut u64 {
        match kind {
            NodeKind::Leaf => &mut self.leaves,
            NodeKind::Segment => &mut self.segments,
            NodeKind::Skeleton => &mut self.skeletons,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        for value in [
            self.root,
            self.leaves,
            self.segments,
            self.skeletons,
            self.node_bytes,
        ] {
            w.u64(value);
        }
        w.into_vec()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let read = || {
            let mut r = Reader::new(bytes);
            let meta = Self {
                root: r.u64()?,
                leaves: r.u64()?,
                segments: r.u64()?,
                skeletons: r.u64()?,
                node_bytes: r.u64()?,
            };
            r.finish().map(|()| meta)
        };
        let meta = read().map_err(Error::malformed("node table counters", 0))?;
        // Sums of them are taken without care.
        let most = [meta.leaves, meta.segments, meta.skeletons, meta.node_bytes];
        if most
            .into_iter()
            .any(|counter| counter > i64::MAX as u64 / 4)
        {
            let detail = format!("N6: {meta:?} is more than any volume holds");
            return Err(Error::corrupt("node table counters", 0, detail));
        }
        Ok(meta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USABLE: Extent = Extent::new(0, 1 << 30);

    #[test]
    fn counters_that_no_volume_reaches_are_corrupt() {
        let counters = |leaves| Meta {
            leaves,
            segments: 1,
            ..Meta::default()
        };
        let read = |leaves| Meta::decode(&counters(leaves).encode());
        assert_eq!(read(1 << 40).unwrap().leaves, 1 << 40);
        assert!(matches!(read(u64::MAX), Err(Error::Corrupt { .. })));
    }

    fn node(children: Vec<u64>) -> NewNode {
        NewNode {
            id: NodeId(7),
            extent: Extent::new(0x20_0000, 0x3000),
            offset: 0,
            copy: None,
            used_bytes: 0x2f01,
            checksum: 0x1122_3344_5566_7788,
            kind: NodeKind::Skeleton,
            height: 2,
            children: children.into_iter().map(NodeId).collect(),
        }
    }

    #[test]
    fn golden_bytes() {
        let (head, pieces) = Head::of(&node(vec![5, 6, 4, 4]), 3).unwrap();
        let golden = [
            3, 2, 0x80, 4, 3, 0x81, 0x5e, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 3, 4, 4,
            10, 2, 3, 0,
        ];
        assert_eq!((head.encode(), pieces.len()), (golden.to_vec(), 0));
        let twice = NewNode {
            copy: Some(0x30_0000),
            ..node(vec![5, 6, 4, 4])
        };
        let (head, _) = Head::of(&twice, 3).unwrap();
        let bytes = [&[0x83, 2, 0x80, 4, 3, 0x80, 6], &golden[5..]].concat();
        assert_eq!(head.encode(), bytes);
        assert_eq!(Head::decode(NodeId(7), &bytes, USABLE).unwrap(), head);
        let guest = NewNode {
            offset: 0x81,
            used_bytes: 0x2f01,
            ..node(vec![5, 6, 4, 4])
        };
        let (head, _) = Head::of(&guest, 3).unwrap();
        assert_eq!(head.extents().count(), 0);
        let bytes = [&[0x43, 2, 0x80, 4, 3, 0x81, 1, 0x81, 0x5e], &golden[7..]].concat();
        assert_eq!(head.encode(), bytes);
        assert_eq!(Head::decode(NodeId(7), &bytes, USABLE).unwrap(), head);
        let high = NewNode {
            height: 70_000,
            ..node(vec![5, 6, 4, 4])
        };
        let (head, _) = Head::of(&high, 3).unwrap();
        assert_eq!(head.encode()[..7], [3, 0xf0, 0xa2, 4, 0x80, 4, 3]);
        assert_eq!(
            Head::decode(NodeId(7), &head.encode(), USABLE).unwrap(),
            head
        );
        assert_eq!(record_key(NodeId(7)), [1, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(piece_key(NodeId(7), 2), [1, 0, 0, 0, 0, 0, 0, 0, 7, 2]);
    }

    #[test]
    fn forged_guests_are_corrupt() {
        let guest = |offset| NewNode {
            offset,
            ..node(vec![5])
        };
        let decode = |bytes: &[u8]| Head::decode(NodeId(7), bytes, USABLE);
        let good = Head::of(&guest(0xff), 1).unwrap().0.encode();
        assert_eq!(decode(&good).unwrap().offset, 0xff);
        // One byte more does not fit the extent.
        let long = Head::of(&guest(0x100), 1).unwrap().0.encode();
        let mut twice = good.clone();
        twice[0] |= KEPT_TWICE;
        let mut at_front = good.clone();
        at_front[5..7].copy_from_slice(&[0x80, 0]);
        let mut outside = Head::of(&node(vec![5]), 1).unwrap().0;
        outside.offset = 1;
        outside.extent.addr = USABLE.end();
        for forged in [long, twice, at_front, outside.encode()] {
            assert!(decode(&forged).is_err(), "{forged:x?}");
        }
    }

    #[test]
    fn keys_parse_back() {
        let id = NodeId(0x0102_0304_0506_0708);
        assert_eq!(parse_key(&Meta::KEY).unwrap(), KeyKind::Meta);
        assert_eq!(parse_key(&record_key(id)).unwrap(), KeyKind::Record(id));
        assert_eq!(parse_key(&piece_key(id, 9)).unwrap(), KeyKind::Piece(id, 9));
        assert_eq!(parse_key(&zombie_key(id)).unwrap(), KeyKind::Zombie(id));
        for bad in [
            &[][..],
            &[4],
            &[0],
            &[1, 2],
            &[2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[3, 3],
        ] {
            assert!(
                matches!(parse_key(bad), Err(Error::Corrupt { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn child_lists_of_every_length_come_back() {
        for len in [0u64, 1, 2, 400, 1000, 30_000] {
            // Worst case for the differences: every second one needs ten bytes.
            let ids = (0..len).map(|i| if i % 2 == 0 { i } else { u64::MAX / 2 - i });
            let node = node(ids.collect());
            let (head, pieces) = Head::of(&node, 1).unwrap();
            assert_eq!(usize::from(head.pieces()), pieces.len());
            let bytes = head.encode();
            assert!(bytes.len() <= SHAPE.value_max());
            let back = Head::decode(node.id, &bytes, USABLE).unwrap();
            let pieces: Vec<Box<[u8]>> = pieces.into_iter().map(Into::into).collect();
            assert_eq!(
                back.into_record(node.id, &pieces).unwrap().children,
                node.children
            );
        }
    }

    #[test]
    fn a_child_list_beyond_the_limit_is_too_long() {
        let ids = (0..60_000).map(|i| if i % 2 == 0 { i } else { u64::MAX / 2 - i });
        let got = Head::of(&node(ids.collect()), 1);
        assert!(matches!(
            got,
            Err(Error::TooLong {
                what: "child list",
                ..
            })
        ));
    }

    #[test]
    fn flipped_bytes_never_panic_and_cuts_are_corrupt() {
        let (head, _) = Head::of(&node((0..50).collect()), 3).unwrap();
        let good = head.encode();
        for at in 0..good.len() {
            assert!(Head::decode(NodeId(7), &good[..at], USABLE).is_err());
            for flip in 1..=255u8 {
                let mut bad = good.clone();
                bad[at] ^= flip;
                if let Ok(head) = Head::decode(NodeId(7), &bad, USABLE) {
                    drop(head.into_record(NodeId(7), &[]));
                }
            }
        }
    }
}

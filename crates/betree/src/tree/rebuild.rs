//! A new node table and a new space map out of the nodes on the device: `fsck --rebuild`.
//!
//! ```text
//!  1 find      trailers of all nodes, records of the old table        reads the device once
//!  2 choose    the root that the superblock names, or the one before
//!  3 survey    from the root down: nodes that live, nodes that are lost
//!  4 fill      a new table in space that no living node and no record of the journal names
//!  5 sync, superblock, sync
//! ```
//!
//! A node that nothing below the root names stays out, however well it is preserved: so nothing
//! comes back that was deleted. A node that is named and not found gets a record all the same, for
//! a block that does not have the checksum. Its keys answer with an error, as those of any node that
//! cannot be read, until they are removed or written over; never with older contents. A node that
//! lies there and cannot be read keeps its place, and the nodes of its old record stay below it.
//!
//! Nothing that a living node occupies is written over, and the superblock comes last. So a rebuild
//! that was cut off begins again. When the root of the newest checkpoint is lost, the one before is
//! tried: its changes since may be lost, and so may be nodes whose space was used again.

use std::sync::Arc;

use ramet_block::encoding::Writer;
use ramet_block::superblock::{read_copies, read_superblock, write_superblock};
use ramet_block::{
    BLOCK_BYTES, Budget, Call, Device, Extent, MetadataCopies, Superblock, checksum,
};
use ramet_nodetable::{NewNode, NodeId, NodeKind, NodeTable, OldTable};

use crate::error::{Error, Result, io_error, io_error_at};
use crate::journal::journal::Journal;
use crate::node::handle::{Kind, Place};
use crate::node::run_index::{RUN_HEADER_BYTES, RUN_MAGIC};
use crate::node::trailer::{TRAILER_BYTES, Trailer};
use crate::tree::found_nodes::{FoundNodes, read_node};
use crate::tree::found_walk::{Item, Survey, named_handle, skeleton_at};
use crate::tree::open::{usable, uuid_low};
use crate::tree::overlaps::{displaced, holes};
use crate::tree::record;
use crate::tree::scrub::Damage;

/// Nodes that one commit adds to the new table.
const BATCH: usize = 4096;
/// Bytes that the record of a lost node calls used.
const LOST_BYTES: usize = 64;

/// The outcome of a rebuild.
#[derive(Debug, Default)]
pub struct Rebuilt {
    /// Nodes in the new table.
    pub nodes: u64,
    /// Nodes that are named and were not found or cannot be read, with their keys.
    pub lost: Vec<Damage>,
    /// Other things to know, a line each.
    pub notes: Vec<String>,
}

/// Makes a new node table and a new space map for the volume on `dev`, which nobody has open,
/// from the nodes that lie there. Durable on return. The entries for the nodes found take half
/// of the `budget` at most. `progress` is told the bytes read and those to read.
///
/// # Errors
/// `NotAVolume`, `Corrupt` when no root is left, `Invalid` when the budget is too small,
/// `NoSpace`, and `Io` when a write fails or a node is not as it was read before. Nothing has
/// changed then.
pub fn rebuild(
    dev: &Arc<dyn Device>,
    budget: &Budget,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Rebuilt> {
    let newest = read_superblock(&**dev)?;
    let mut found = FoundNodes::new(&newest, usable(&newest), budget);
    found.search(&**dev, progress)?;
    let mut rebuilt = Rebuilt::default();
    if found.unreadable > 0 {
        let count = found.unreadable;
        rebuilt.notes.push(format!("{count} blocks cannot be read"));
    }
    let (mut next, old) = choose(dev, &newest, &mut found, &mut rebuilt)?;
    let root = (next.root_node != 0).then_some(NodeId(next.root_node));

    let journal = named_by_journal(&**dev, &next);
    let survey = survey_of(&**dev, &mut found, &old, root, &journal);
    let live = survey.live().into_iter();
    let live = live.map(|at| found.node(at).place.extent);
    let live = live.chain(journal.iter().map(|(_, extent)| *extent));
    let holes = holes(usable(&newest), live.collect());
    found.erase_left_over(&**dev, &holes)?;

    let copies = next.metadata_copies;
    let table = NodeTable::empty_within(dev, usable(&newest), copies, &holes)?;
    let mut filler = Filler {
        dev: &**dev,
        found: &found,
        table: &table,
        sb: &next,
        batch: Vec::new(),
        nodes: 0,
    };
    survey.fill(&**dev, &found, root, &mut |item| filler.add(item))?;
    let commit = filler.commit(root)?;
    rebuilt.nodes = filler.nodes;
    rebuilt.lost = survey.lost;
    next.node_table = commit.roots.node_table;
    next.space_map = commit.roots.space_map;
    dev.sync()
        .map_err(io_error(Call::Sync, "a new node table"))?;
    write_superblock(&**dev, &next)?;
    dev.sync().map_err(io_error(Call::Sync, "a superblock"))?;
    Ok(rebuilt)
}

/// The nodes that live and those that are lost. Nodes that were found in the place of others are
/// among the latter.
fn survey_of(
    dev: &dyn Device,
    found: &mut FoundNodes,
    old: &[OldTable],
    root: Option<NodeId>,
    journal: &[(NodeId, Extent)],
) -> Survey {
    loop {
        let survey = Survey::of(dev, found, old, root);
        let wrong = displaced(dev, found, &survey.live(), journal, root);
        if wrong.is_empty() {
            return survey;
        }
        found.displace(wrong);
    }
}

/// The superblock to be written, without its tables: of the newest checkpoint whose root is left;
/// and the rest of the old tables.
fn choose(
    dev: &Arc<dyn Device>,
    newest: &Superblock,
    found: &mut FoundNodes,
    rebuilt: &mut Rebuilt,
) -> Result<(Superblock, Vec<OldTable>)> {
    let mut old = Vec::new();
    let older = read_copies(&**dev).into_iter().flatten().flatten();
    let older = older
        .filter(|sb| sb.generation < newest.generation)
        .max_by_key(|sb| sb.generation);
    for sb in [Some(newest.clone()), older].into_iter().flatten() {
        let root = match sb.root_node {
            0 => None,
            id => {
                old.push(trust_table(dev, &sb, found, rebuilt)?);
                let copies = found.copies_of(&**dev, NodeId(id));
                let whole = |node: &Trailer| skeleton_at(&**dev, &node.place).is_ok();
                match copies.into_iter().find(whole) {
                    None => continue,
                    root => root,
                }
            }
        };
        if let Some(root) = root {
            found.trust(root);
            found.take_told()?;
        }
        let is_newest = sb.generation == newest.generation;
        if !is_newest {
            rebuilt.notes.push(format!(
                "the root of checkpoint {} is lost; went back to checkpoint {}, later changes are lost, and what they deleted may be back",
                newest.generation, sb.generation
            ));
        }
        let mut next = sb;
        // Frames of a later epoch do not follow on an older checkpoint, and are never taken for new
        // ones.
        next.epoch += u64::from(next.epoch != newest.epoch) * (newest.epoch + 1 - next.epoch);
        next.clean &= is_newest;
        next.generation = newest.generation + 1;
        next.next_node = next.next_node.max(newest.next_node);
        // A rebuild writes nodes: those that are lost, and guests that lost their carrier.
        next.openings = next.openings.max(newest.openings) + 1;
        return Ok((next, old));
    }
    Err(Error::Corrupt {
        what: "root",
        addr: 0,
        detail: format!("no copy of node {} is left", newest.root_node),
    })
}

/// Takes the records of the old table that can be read for the truth about their nodes.
fn trust_table(
    dev: &Arc<dyn Device>,
    sb: &Superblock,
    found: &mut FoundNodes,
    rebuilt: &mut Rebuilt,
) -> Result<OldTable> {
    let old = OldTable::open(dev, sb.node_table, usable(sb), sb.metadata_copies)?;
    let mut visit = |id, record: &ramet_nodetable::NodeRecord| {
        let kind = match record.kind {
            NodeKind::Leaf => Kind::Leaf,
            NodeKind::Segment => Kind::Segment,
            NodeKind::Skeleton => Kind::Skeleton,
        };
        found.trust(Trailer {
            id,
            opening: sb.openings,
            kind,
            height: record.height,
            place: Place {
                extent: record.extent,
                offset: record.offset,
                used_bytes: record.used_bytes,
                checksum: record.checksum,
            },
        });
    };
    let lost = old.visit(&mut visit);
    found.take_told()?;
    if lost > 0 {
        rebuilt
            .notes
            .push(format!("{lost} pages of the node table are lost"));
    }
    Ok(old)
}

/// The leaves that records of the journal name, and their extents.
fn named_by_journal(dev: &dyn Device, sb: &Superblock) -> Vec<(NodeId, Extent)> {
    let mut named = Vec::new();
    let mut look = |_, bytes: &[u8]| {
        let mut leaf_at = |id, place: Place| {
            named.push((id, place.extent));
            Some(named_handle(id, Kind::Leaf, 0))
        };
        let decoded = record::decode(bytes, &mut leaf_at);
        decoded.map(drop).map_err(|error| Error::Corrupt {
            what: "journal record",
            addr: sb.journal.addr,
            detail: error.to_string(),
        })
    };
    let timeline = (uuid_low(&sb.uuid), sb.epoch);
    // The opener judges the journal, and replays no more of it than is read here.
    let _ = Journal::replay_prefix(dev, sb.journal, timeline, sb.journal_start, &mut look);
    // The opener refuses the others.
    named.retain(|(_, extent)| extent.validate(usable(sb)).is_ok());
    named
}

/// Adds nodes to the new table.
struct Filler<'a> {
    dev: &'a dyn Device,
    found: &'a FoundNodes,
    table: &'a NodeTable,
    sb: &'a Superblock,
    batch: Vec<NewNode>,
    nodes: u64,
}

impl Filler<'_> {
    fn add(&mut self, item: Item<'_>) -> Result<()> {
        let node = match item {
            Item::Found(node, children) if self.is_without_carrier(node, &children) => {
                new_node(&self.rewrite(node)?, children)
            }
            Item::Found(node, children) if node.id.0 == self.sb.root_node => NewNode {
                copy: self.copy_root(&node.place)?,
                ..new_node(node, children)
            },
            Item::Found(node, children) => new_node(node, children),
            // The extent of a guest is that of another node, and perhaps of none.
            Item::Unreadable(node, children) if self.is_without_carrier(node, &children) => {
                let lost = self.write_lost(node.id, node.kind, node.height)?;
                new_node(&lost, children)
            }
            Item::Unreadable(node, children) if node.id.0 == self.sb.root_node => NewNode {
                copy: self.copy_root(&node.place)?,
                ..new_node(node, children)
            },
            Item::Unreadable(node, children) => new_node(node, children),
            Item::Lost(id, kind, height, children) => {
                let lost = self.write_lost(id, kind, height)?;
                new_node(&lost, children)
            }
        };
        self.nodes += 1;
        self.batch.push(node);
        if self.batch.len() >= BATCH {
            let commit = self.commit(None)?;
            self.table.committed(commit);
        }
        Ok(())
    }

    fn commit(&mut self, root: Option<NodeId>) -> Result<ramet_nodetable::Commit> {
        let new = std::mem::take(&mut self.batch);
        // Nothing is reclaimed: the nodes that name those without references come later.
        Ok(self.table.commit(new, root, 0, &|_| true)?)
    }

    /// Writes the second copy of the root, if it is to have one. Returns its address.
    fn copy_root(&self, place: &Place) -> Result<Option<u64>> {
        if self.sb.metadata_copies == MetadataCopies::One {
            return Ok(None);
        }
        let len = place.extent.len;
        let mut bytes = vec![0; usize::try_from(len).expect("a node fits memory")];
        let read = self.dev.read_at(place.extent.addr, &mut bytes);
        read.map_err(io_error_at(Call::Read, "the root", place.extent.addr))?;
        let addr = self.table.space().alloc_copy(len)?.addr;
        let written = self.dev.write_at(addr, &bytes);
        written.map_err(io_error_at(
            Call::Write,
            "the second copy of the root",
            addr,
        ))?;
        Ok(Some(addr))
    }

    /// Whether a node is a guest, and none of its children was found to own its extent: the carrier
    /// is lost, and gets another place.
    fn is_without_carrier(&self, node: &Trailer, children: &[NodeId]) -> bool {
        let place = |child: &NodeId| {
            self.found
                .position(*child)
                .map(|at| self.found.node(at).place)
        };
        let is_carrier = |carrier: Place| {
            !carrier.is_guest()
                && carrier.extent == node.place.extent
                && carrier.used_bytes <= node.place.offset
        };
        node.place.is_guest() && !children.iter().filter_map(place).any(is_carrier)
    }

    /// Writes a guest, which was read before, to an extent of its own.
    fn rewrite(&self, node: &Trailer) -> Result<Trailer> {
        let mut bytes = read_node(self.dev, &node.place)?;
        let len = (bytes.len() + TRAILER_BYTES).next_multiple_of(BLOCK_BYTES as usize);
        let extent = self.table.space().alloc_reserved(len as u64)?;
        let moved = Trailer {
            opening: self.sb.openings,
            place: Place {
                extent,
                offset: 0,
                ..node.place
            },
            ..*node
        };
        bytes.resize(len - TRAILER_BYTES, 0);
        bytes.extend(moved.encode(self.sb.node_seed));
        let written = self.dev.write_at(extent.addr, &bytes);
        written.map_err(io_error_at(Call::Write, "a node", extent.addr))?;
        Ok(moved)
    }

    /// Writes a block for a node that is lost. It does not have the checksum that the table holds.
    fn write_lost(&self, id: NodeId, kind: Kind, height: u32) -> Result<Trailer> {
        let extent = self.table.space().alloc_reserved(BLOCK_BYTES)?;
        let mut w = Writer::with_capacity(BLOCK_BYTES as usize);
        let front = if kind == Kind::Skeleton {
            LOST_BYTES
        } else {
            // So much that a reader gets as far as the checksum.
            w.u32(RUN_MAGIC);
            w.u32(kind as u32);
            w.u32(RUN_HEADER_BYTES as u32);
            RUN_HEADER_BYTES
        };
        w.pad_to(BLOCK_BYTES as usize - TRAILER_BYTES);
        let mut bytes = w.into_vec();
        let lost = Trailer {
            id,
            opening: self.sb.openings,
            kind,
            height,
            place: Place {
                extent,
                offset: 0,
                used_bytes: LOST_BYTES as u32,
                checksum: !checksum(&bytes[..front]),
            },
        };
        bytes.extend(lost.encode(self.sb.node_seed));
        let written = self.dev.write_at(extent.addr, &bytes);
        written.map_err(io_error_at(Call::Write, "a node", extent.addr))?;
        Ok(lost)
    }
}

fn new_node(node: &Trailer, children: Vec<NodeId>) -> NewNode {
    NewNode {
        id: node.id,
        extent: node.place.extent,
        offset: node.place.offset,
        copy: None,
        used_bytes: node.place.used_bytes,
        checksum: node.place.checksum,
        kind: node.kind.in_table(),
        height: node.height,
        children,
    }
}

//! A new node table and a new space map out of the nodes on the device: `fsck --rebuild`.
//!
//! ```text
//!  1 find      trailers of all nodes, records of the old table        reads the device once
//!  2 choose    the root that the superblock names, or the one before
//!  3 walk      from the root down: nodes that live, nodes that are lost
//!  4 fill      a new table in space that no living node and no record of the journal names
//!  5 sync, superblock, sync
//! ```
//!
//! A node that nothing below the root names stays out, however well it is preserved: so nothing
//! comes back that was deleted. A node that is named and not found gets a record all the same, for
//! a block that does not have the checksum. Its keys answer with an error, as those of any node that
//! cannot be read, until they are removed or written over; never with older contents.
//!
//! Nothing that a living node occupies is written over, and the superblock comes last. So a rebuild
//! that was cut off begins again. When the root of the newest checkpoint is lost, the one before is
//! tried: its changes since may be lost, and so may be nodes whose space was used again.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use ramet_block::encoding::Writer;
use ramet_block::superblock::{read_copies, read_superblock, write_superblock};
use ramet_block::{
    BLOCK_BYTES, Budget, Call, Device, Extent, MetadataCopies, Superblock, checksum,
};
use ramet_nodetable::{NewNode, NodeId, NodeKind, NodeTable};

use crate::error::{Error, Result, io_error, io_error_at};
use crate::journal::journal::Journal;
use crate::key::range::KeyRange;
use crate::node::handle::{Handle, Kind, Owner, Place, Stage};
use crate::node::message::RangeMsg;
use crate::node::run_index::{RUN_HEADER_BYTES, RUN_MAGIC, RunIndex, index_len};
use crate::node::skeleton::Skeleton;
use crate::node::trailer::{TRAILER_BYTES, Trailer};
use crate::node::wire::MALFORMED;
use crate::store::handles::Handles;
use crate::tree::found_nodes::{FoundNodes, read_node};
use crate::tree::open::{usable, uuid_low};
use crate::tree::record;
use crate::tree::scrub::{Damage, Way, damage};

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

/// A node as the node above names it.
struct Named {
    id: NodeId,
    kind: Kind,
    height: u32,
    way: Way,
}

enum Step {
    Enter(Named),
    /// With the nodes that it names, if it can be read.
    Leave(NodeId, Option<Vec<NodeId>>),
}

/// A node below the root.
enum Item<'a> {
    /// With the nodes that it names, one entry for each time.
    Found(&'a Trailer, Vec<NodeId>),
    /// It lies there, and cannot be read. Told already.
    Unreadable(&'a Trailer),
    Lost(&'a Named),
}

struct Walk<'a> {
    dev: &'a dyn Device,
    found: &'a FoundNodes,
    lost: Vec<Damage>,
}

/// Makes a new node table and a new space map for the volume on `dev`, which nobody has open,
/// from the nodes that lie there. Durable on return. The entries for the nodes found take half
/// of the `budget` at most. `progress` is told the bytes read and those to read.
///
/// # Errors
/// `NotAVolume`, `Corrupt` when no root is left, `Invalid` when the budget is too small,
/// `NoSpace`, and `Io` when a write fails. Nothing has changed then.
pub fn rebuild(
    dev: &Arc<dyn Device>,
    budget: &Budget,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Rebuilt> {
    let newest = read_superblock(&**dev)?;
    let mut found = FoundNodes::new(newest.node_seed, budget);
    found.search(&**dev, usable(&newest), progress)?;
    let mut rebuilt = Rebuilt::default();
    if found.unreadable > 0 {
        let count = found.unreadable;
        rebuilt.notes.push(format!("{count} blocks cannot be read"));
    }
    let mut next = choose(dev, &newest, &mut found, &mut rebuilt)?;
    let root = (next.root_node != 0).then_some(NodeId(next.root_node));

    let mut live = named_by_journal(&**dev, &next);
    let mut walk = Walk::new(&**dev, &found);
    walk.all(root, &mut |item| {
        if let Item::Found(node, _) | Item::Unreadable(node) = item {
            live.push(node.place.extent);
        }
        Ok(())
    })?;
    rebuilt.lost = walk.lost;
    let holes = holes(usable(&newest), live)?;

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
    Walk::new(&**dev, &found).all(root, &mut |item| filler.add(item))?;
    let commit = filler.commit(root)?;
    rebuilt.nodes = filler.nodes;
    next.node_table = commit.roots.node_table;
    next.space_map = commit.roots.space_map;
    dev.sync()
        .map_err(io_error(Call::Sync, "a new node table"))?;
    write_superblock(&**dev, &next)?;
    dev.sync().map_err(io_error(Call::Sync, "a superblock"))?;
    Ok(rebuilt)
}

/// The superblock to be written, without its tables: of the newest checkpoint whose root is left.
fn choose(
    dev: &Arc<dyn Device>,
    newest: &Superblock,
    found: &mut FoundNodes,
    rebuilt: &mut Rebuilt,
) -> Result<Superblock> {
    let older = read_copies(&**dev).into_iter().flatten().flatten();
    let older = older
        .filter(|sb| sb.generation < newest.generation)
        .max_by_key(|sb| sb.generation);
    for sb in [Some(newest.clone()), older].into_iter().flatten() {
        let root = match sb.root_node {
            0 => None,
            id => {
                trust_table(dev, &sb, found, rebuilt)?;
                let copies = found.copies_of(NodeId(id));
                let whole = |node: &Trailer| skeleton_at(&**dev, &node.place).is_ok();
                match copies.into_iter().find(whole) {
                    None => continue,
                    root => root,
                }
            }
        };
        if let Some(root) = root {
            found.trust(root);
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
        return Ok(next);
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
) -> Result<()> {
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
    let lost = NodeTable::visit_readable(
        dev,
        sb.node_table,
        usable(sb),
        sb.metadata_copies,
        &mut visit,
    )?;
    if lost > 0 {
        rebuilt
            .notes
            .push(format!("{lost} pages of the node table are lost"));
    }
    Ok(())
}

/// The extents that records of the journal name.
fn named_by_journal(dev: &dyn Device, sb: &Superblock) -> Vec<Extent> {
    let mut named = Vec::new();
    let mut look = |_, bytes: &[u8]| {
        let mut leaf_at = |id, place: Place| {
            named.push(place.extent);
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
    named
}

/// The parts of `usable` outside of `live`.
///
/// # Errors
/// `Corrupt` when two extents overlap, or leave the area.
fn holes(usable: Extent, mut live: Vec<Extent>) -> Result<Vec<Extent>> {
    live.sort_unstable();
    live.dedup();
    let (mut holes, mut from) = (Vec::new(), usable.addr);
    for extent in live {
        if extent.addr < from || extent.end() > usable.end() {
            return Err(Error::Corrupt {
                what: "node",
                addr: extent.addr,
                detail: format!("{extent} overlaps another node"),
            });
        }
        if extent.addr > from {
            holes.push(Extent::new(from, extent.addr - from));
        }
        from = extent.end();
    }
    if from < usable.end() {
        holes.push(Extent::new(from, usable.end() - from));
    }
    Ok(holes)
}

/// Stands for a node in contents that are decoded to see which nodes they name.
fn named_handle(id: NodeId, kind: Kind, height: u32) -> Arc<Handle> {
    let owner: Weak<Handles> = Weak::new();
    let owner: Weak<dyn Owner> = owner;
    Handle::new((id, kind, height), Stage::Recorded, None, owner)
}

fn child_of(id: u64, height: u32) -> Option<Arc<Handle>> {
    let kind = match height {
        0 => Kind::Leaf,
        _ => Kind::Skeleton,
    };
    Some(named_handle(NodeId(id), kind, height))
}

fn corrupt(place: &Place, detail: impl ToString) -> Error {
    Error::Corrupt {
        what: "node",
        addr: place.addr(),
        detail: detail.to_string(),
    }
}

fn verify(bytes: &[u8], place: &Place) -> Result<()> {
    if checksum(bytes) == place.checksum {
        return Ok(());
    }
    Err(corrupt(place, "it has another checksum"))
}

fn skeleton_at(dev: &dyn Device, place: &Place) -> Result<Skeleton> {
    let bytes = read_node(dev, place)?;
    verify(&bytes, place)?;
    let mut segment = |id| Some(named_handle(NodeId(id), Kind::Segment, 0));
    let node = Skeleton::decode(&bytes, &mut child_of, &mut segment);
    node.map_err(|error| corrupt(place, error))
}

fn segment_at(dev: &dyn Device, place: &Place) -> Result<RunIndex> {
    let bytes = read_node(dev, place)?;
    let len = index_len(&bytes, place.used_bytes).ok_or_else(|| corrupt(place, MALFORMED))?;
    let front = &bytes[..len];
    verify(front, place)?;
    let index = RunIndex::decode(front, Kind::Segment, place.used_bytes, &mut child_of);
    index.map_err(|error| corrupt(place, error))
}

impl<'a> Walk<'a> {
    fn new(dev: &'a dyn Device, found: &'a FoundNodes) -> Self {
        Self {
            dev,
            found,
            lost: Vec::new(),
        }
    }

    /// Visits each node below `root` once, behind all nodes that it names.
    fn all(
        &mut self,
        root: Option<NodeId>,
        visit: &mut dyn FnMut(Item<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut seen = vec![false; self.found.count()];
        let mut seen_lost = HashSet::new();
        let root = root.and_then(|id| self.found.position(id));
        let root = root.map(|at| self.found.node(at));
        let mut steps: Vec<Step> = Vec::new();
        steps.extend(root.map(|root| {
            Step::Enter(Named {
                id: root.id,
                kind: root.kind,
                height: root.height,
                way: Way::root(),
            })
        }));
        while let Some(step) = steps.pop() {
            let named = match step {
                Step::Leave(id, names) => {
                    let at = self.found.position(id).expect("it was entered");
                    let node = self.found.node(at);
                    visit(match names {
                        Some(names) => Item::Found(node, names),
                        None => Item::Unreadable(node),
                    })?;
                    continue;
                }
                Step::Enter(named) => named,
            };
            let at = self.found.position(named.id).filter(|at| {
                let node = self.found.node(*at);
                (node.kind, node.height) == (named.kind, named.height)
            });
            let Some(at) = at else {
                if seen_lost.insert(named.id) {
                    self.tell_lost(&named);
                    visit(Item::Lost(&named))?;
                }
                continue;
            };
            if !std::mem::replace(&mut seen[at], true) {
                let below = self.names_of(&named, self.found.node(at));
                let ids = |below: &Vec<Named>| below.iter().map(|child| child.id).collect();
                steps.push(Step::Leave(named.id, below.as_ref().map(ids)));
                let below = below.into_iter().flatten();
                steps.extend(below.rev().map(Step::Enter));
            }
        }
        Ok(())
    }

    fn tell_lost(&mut self, named: &Named) {
        let error = Error::Corrupt {
            what: "node",
            addr: 0,
            detail: format!(
                "node {} ({:?} of height {}) is not on the device",
                named.id.0, named.kind, named.height
            ),
        };
        self.lost.push(damage(error, named.way.range()));
    }

    /// The nodes that a node names; `None` of a node that cannot be read, which is told.
    fn names_of(&mut self, named: &Named, node: &Trailer) -> Option<Vec<Named>> {
        let mut below = Vec::new();
        let mut push = |range: &KeyRange, translation: &_, child: &Arc<Handle>| {
            below.push(Named {
                id: child.id(),
                kind: child.kind(),
                height: child.height(),
                way: named.way.below(range, translation),
            });
        };
        let read = match node.kind {
            Kind::Leaf => Ok(()),
            Kind::Segment => segment_at(self.dev, &node.place).map(|run| {
                for (range, msg) in &run.ranges {
                    if let RangeMsg::Goto(target) = msg {
                        push(range, &target.translation, &target.node);
                    }
                }
            }),
            Kind::Skeleton => skeleton_at(self.dev, &node.place).map(|node| {
                for (at, edge) in node.edges.iter().enumerate() {
                    if let Some(child) = &edge.child {
                        push(&node.edge_range(at), &child.translation, &child.node);
                    }
                }
                for segment in &node.segs {
                    push(&segment.clip, &segment.translation, &segment.run);
                }
            }),
        };
        if let Err(error) = read {
            self.lost.push(damage(error, named.way.range()));
            return None;
        }
        Some(below)
    }
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
            Item::Unreadable(node) if node.place.is_guest() => {
                let lost = self.write_lost(node.id, node.kind, node.height)?;
                new_node(&lost, Vec::new())
            }
            Item::Unreadable(node) if node.id.0 == self.sb.root_node => NewNode {
                copy: self.copy_root(&node.place)?,
                ..new_node(node, Vec::new())
            },
            Item::Unreadable(node) => new_node(node, Vec::new()),
            Item::Lost(named) => {
                let lost = self.write_lost(named.id, named.kind, named.height)?;
                new_node(&lost, Vec::new())
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
        let is_carrier =
            |carrier: Place| !carrier.is_guest() && carrier.extent == node.place.extent;
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

//! The nodes that lie on a device, found without a node table: by their trailers, and by the pages
//! of the old table that can still be read.
//!
//! Every block of the usable area is read once, in order. Memory holds an entry for each node found,
//! for stale ones too; a budget bounds their number. Of several entries of one id the one of the
//! newest opening is right, whole or not: see [`crate::node::trailer`]. An opening that the volume
//! does not know of is that of a rebuild that was cut off. Its entries count if the nodes are whole.
//! A record of the old table outweighs them all.

use std::cmp::Reverse;
use std::collections::HashSet;

use ramet_block::{Budget, Call, Device, Extent, Superblock, checksum};
use ramet_nodetable::NodeId;

use crate::error::{Error, Result, io_error_at};
use crate::node::handle::{Kind, Place};
use crate::node::run_index::index_len;
use crate::node::trailer::Trailer;

/// Bytes of one request.
const READ_BYTES: u64 = 1 << 20;
const BLOCK: usize = ramet_block::BLOCK_BYTES as usize;
/// The entries may take this part of the budget.
const PART: u64 = 2;

/// Stands for the opening of a node of which a record of the old table tells.
const OF_A_RECORD: u64 = u64::MAX;

/// The block with the trailer of a node.
fn last_block(node: &Trailer) -> Extent {
    let len = BLOCK as u64;
    Extent::new(node.place.extent.end() - len, len)
}

/// See the module header.
pub(crate) struct FoundNodes {
    seed: u64,
    /// Number of the newest opening that the volume knows of.
    openings: u64,
    usable: Extent,
    /// Sorted by id once the search is done; one entry each.
    nodes: Vec<Trailer>,
    /// Trailers that lie elsewhere than they say, with the end of their block: second copies.
    copies: Vec<(Trailer, u64)>,
    /// Nodes that records told of and that are not among the others yet.
    told: Vec<Trailer>,
    /// The last blocks of nodes that rebuilds left over, and that are not right.
    left_over: Vec<Extent>,
    /// Nodes that were found in the place of others.
    displaced: HashSet<NodeId>,
    nodes_max: usize,
    is_over: bool,
    /// Blocks that could not be read.
    pub(crate) unreadable: u64,
}

impl FoundNodes {
    /// Nothing found yet on the volume of `newest`; the entries will fit `budget`.
    pub(crate) fn new(newest: &Superblock, usable: Extent, budget: &Budget) -> Self {
        let bytes = usize::try_from(budget.part(PART)).unwrap_or(usize::MAX);
        Self {
            seed: newest.node_seed,
            openings: newest.openings,
            usable,
            nodes: Vec::new(),
            copies: Vec::new(),
            told: Vec::new(),
            displaced: HashSet::new(),
            left_over: Vec::new(),
            // A vector that grows takes up to three times the bytes of its entries for a moment.
            nodes_max: bytes / size_of::<Trailer>() / 3,
            is_over: false,
            unreadable: 0,
        }
    }

    /// Reads all blocks of the usable area. Unreadable ones are counted.
    ///
    /// # Errors
    /// `Invalid` when the entries do not fit the budget.
    pub(crate) fn search(
        &mut self,
        dev: &dyn Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let usable = self.usable;
        let mut buf = vec![0; READ_BYTES.min(usable.len) as usize];
        let mut addr = usable.addr;
        while addr < usable.end() {
            let len = READ_BYTES.min(usable.end() - addr) as usize;
            if dev.read_at(addr, &mut buf[..len]).is_ok() {
                for (at, block) in buf[..len].chunks(BLOCK).enumerate() {
                    self.note(block, addr + (at * BLOCK) as u64)?;
                }
            } else {
                for at in (0..len).step_by(BLOCK) {
                    let block = &mut buf[..BLOCK];
                    match dev.read_at(addr + at as u64, block) {
                        Ok(()) => self.note(&buf[..BLOCK], addr + at as u64)?,
                        Err(_) => self.unreadable += 1,
                    }
                }
            }
            addr += len as u64;
            progress(addr - usable.addr, usable.len);
        }
        self.nodes
            .sort_unstable_by_key(|node| (node.id, Reverse(node.opening)));
        self.choose(dev);
        Ok(())
    }

    /// Keeps one of the entries of each id, or none.
    fn choose(&mut self, dev: &dyn Device) {
        let mut kept = 0;
        let mut from = 0;
        while from < self.nodes.len() {
            let same = &self.nodes[from..];
            let count = same.partition_point(|node| node.id <= same[0].id);
            let chosen = self.right_of(dev, &same[..count]);
            let dropped = same[..count].iter().filter(|node| {
                node.opening > self.openings && chosen.is_none_or(|one| one.place != node.place)
            });
            self.left_over.extend(dropped.map(last_block));
            if let Some(chosen) = chosen {
                self.nodes[kept] = chosen;
                kept += 1;
            }
            from += count;
        }
        self.nodes.truncate(kept);
    }

    /// The right one of the entries of an id, which begin with that of the newest opening. An older
    /// entry may be that of another node, which no checkpoint named: a damaged node is better.
    fn right_of(&self, dev: &dyn Device, of_id: &[Trailer]) -> Option<Trailer> {
        let unknown = of_id.partition_point(|node| node.opening > self.openings);
        let (left_over, known) = of_id.split_at(unknown);
        let left_over = left_over.iter().find(|node| is_whole(dev, node));
        // Rebuilds that were cut off may have had the number of a later opening.
        let newest = known.partition_point(|node| node.opening == known[0].opening);
        let newest = match &known[..newest] {
            [] => None,
            [one] => Some(one),
            several => several
                .iter()
                .find(|node| is_whole(dev, node))
                .or(several.first()),
        };
        left_over.or(newest).copied()
    }

    /// Erases the trailers in `holes` that rebuilds left over and this one has no use for. The
    /// number of their opening becomes that of a superblock: from then on they would pass for newer
    /// than the right nodes.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn erase_left_over(&self, dev: &dyn Device, holes: &[Extent]) -> Result<()> {
        for block in &self.left_over {
            let at = holes.partition_point(|hole| hole.end() < block.end());
            let is_free = holes.get(at).is_some_and(|hole| hole.addr <= block.addr);
            if is_free {
                let written = dev.write_at(block.addr, &[0; BLOCK]);
                written.map_err(io_error_at(Call::Write, "a node", block.addr))?;
            }
        }
        Ok(())
    }

    fn note(&mut self, block: &[u8], addr: u64) -> Result<()> {
        for trailer in Trailer::decode_all(self.seed, block).into_iter().flatten() {
            self.enter(trailer, addr + BLOCK as u64)?;
        }
        Ok(())
    }

    /// Notes a trailer in the block that ends at `end`.
    fn enter(&mut self, trailer: Trailer, end: u64) -> Result<()> {
        if trailer.place.extent.validate(self.usable).is_err() {
            return Ok(());
        }
        if self.is_full() {
            return Err(too_many());
        }
        if trailer.place.extent.end() == end {
            self.nodes.push(trailer);
        } else {
            self.copies.push((trailer, end));
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.nodes.len() + self.copies.len() + self.told.len() >= self.nodes_max
    }

    /// Takes a record of the old table for the truth about its node. Another id than those found
    /// is found after [`FoundNodes::take_told`].
    pub(crate) fn trust(&mut self, node: Trailer) {
        let node = Trailer {
            opening: OF_A_RECORD,
            ..node
        };
        match self.nodes.binary_search_by_key(&node.id, |node| node.id) {
            Ok(at) => self.nodes[at] = node,
            Err(_) if self.is_full() => self.is_over = true,
            Err(_) => self.told.push(node),
        }
    }

    /// Takes the nodes that records told of among the others.
    ///
    /// # Errors
    /// `Invalid` when the entries do not fit the budget.
    pub(crate) fn take_told(&mut self) -> Result<()> {
        if self.is_over {
            return Err(too_many());
        }
        self.nodes.append(&mut self.told);
        self.nodes.sort_unstable_by_key(|node| node.id);
        self.nodes.dedup_by_key(|node| node.id);
        Ok(())
    }

    /// Forgets nodes that were found in the place of others.
    pub(crate) fn displace(&mut self, ids: HashSet<NodeId>) {
        self.nodes.retain(|node| !ids.contains(&node.id));
        self.displaced.extend(ids);
    }

    /// Whether the node was found in the place of another one.
    pub(crate) fn is_displaced(&self, id: NodeId) -> bool {
        self.displaced.contains(&id)
    }

    /// Whether a record of the old table tells of the node at a position.
    pub(crate) fn is_of_a_record(&self, at: usize) -> bool {
        self.nodes[at].opening == OF_A_RECORD
    }

    /// Position of a node among those found.
    pub(crate) fn position(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |node| node.id).ok()
    }

    /// The node at a position.
    pub(crate) fn node(&self, at: usize) -> &Trailer {
        &self.nodes[at]
    }

    /// Number of nodes found.
    pub(crate) fn count(&self) -> usize {
        self.nodes.len()
    }

    /// The places at which copies of the bytes of the node `id` lie, the first one first.
    pub(crate) fn copies_of(&self, dev: &dyn Device, id: NodeId) -> Vec<Trailer> {
        let first = self.position(id).map(|at| self.nodes[at]);
        let others = self.copies.iter().filter(|(node, _)| node.id == id);
        let moved = others.map(|(node, end)| {
            let len = node.place.extent.len;
            let extent = Extent::new(end.saturating_sub(len), len);
            let place = Place {
                extent,
                ..node.place
            };
            Trailer { place, ..*node }
        });
        let mut all: Vec<Trailer> = first.into_iter().chain(moved).collect();
        let is_known = |opening| opening <= self.openings || opening == OF_A_RECORD;
        all.retain(|node| is_known(node.opening) || is_whole(dev, node));
        all.sort_by_key(|node| Reverse(node.opening));
        let bytes = |node: &Trailer| (node.height, node.place.used_bytes, node.place.checksum);
        let right = all.first().map(bytes);
        all.retain(|node| Some(bytes(node)) == right);
        all
    }
}

fn too_many() -> Error {
    Error::Invalid(
        "the memory budget is too small for the nodes of this volume; give more with --memory",
    )
}

/// Whether a node has the checksum that its trailer tells.
pub(crate) fn is_whole(dev: &dyn Device, node: &Trailer) -> bool {
    let Ok(bytes) = read_node(dev, &node.place) else {
        return false;
    };
    let front = match node.kind {
        Kind::Skeleton => Some(bytes.len()),
        Kind::Leaf | Kind::Segment => index_len(&bytes, node.place.used_bytes),
    };
    let front = front.and_then(|len| bytes.get(..len));
    front.is_some_and(|front| checksum(front) == node.place.checksum)
}

/// The used bytes of a node at `place`.
pub(crate) fn read_node(dev: &dyn Device, place: &Place) -> Result<Vec<u8>> {
    let mut bytes = vec![0; place.used_bytes as usize];
    let addr = place.addr();
    let read = dev.read_at(addr, &mut bytes);
    read.map_err(io_error_at(Call::Read, "a node", addr))?;
    Ok(bytes)
}

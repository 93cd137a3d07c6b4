//! The nodes that lie on a device, found without a node table: by their trailers, and by the pages
//! of the old table that can still be read.
//!
//! Every block of the usable area is read once, in order. Memory holds an entry for each node found,
//! for stale ones too; a budget bounds their number. Of several entries of one id the
//! one of the newest opening is right, of those that are whole: see [`crate::node::trailer`]. A record of the old table
//! outweighs them all.

use ramet_block::{Budget, Call, Device, Extent, checksum};
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

/// See the module header.
pub(crate) struct FoundNodes {
    seed: u64,
    /// Sorted by id once the search is done; one entry each.
    nodes: Vec<Trailer>,
    /// Trailers that lie elsewhere than they say, with the end of their block: second copies.
    copies: Vec<(Trailer, u64)>,
    nodes_max: usize,
    /// Blocks that could not be read.
    pub(crate) unreadable: u64,
}

impl FoundNodes {
    /// Nothing found yet; the entries will fit `budget`.
    pub(crate) fn new(seed: u64, budget: &Budget) -> Self {
        let bytes = usize::try_from(budget.part(PART)).unwrap_or(usize::MAX);
        Self {
            seed,
            nodes: Vec::new(),
            copies: Vec::new(),
            // A vector that grows takes up to three times the bytes of its entries for a moment.
            nodes_max: bytes / size_of::<Trailer>() / 3,
            unreadable: 0,
        }
    }

    /// Reads all blocks of `usable`. Unreadable ones are counted.
    ///
    /// # Errors
    /// `Invalid` when the entries do not fit the budget.
    pub(crate) fn search(
        &mut self,
        dev: &dyn Device,
        usable: Extent,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
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
        // The newest opening first.
        self.nodes
            .sort_unstable_by_key(|node| (node.id, u64::MAX - node.opening));
        self.choose(dev);
        Ok(())
    }

    /// Keeps one of the entries of each id: the newest that is whole. A rebuild that was cut off may
    /// have left newer ones.
    fn choose(&mut self, dev: &dyn Device) {
        let mut kept = 0;
        let mut from = 0;
        while from < self.nodes.len() {
            let same = &self.nodes[from..];
            let count = same.partition_point(|node| node.id <= same[0].id);
            let of_id = &same[..count];
            let whole = match of_id {
                [_] => None,
                _ => of_id.iter().find(|node| is_whole(dev, node)),
            };
            let chosen = *whole.unwrap_or(&of_id[0]);
            self.nodes[kept] = chosen;
            kept += 1;
            from += count;
        }
        self.nodes.truncate(kept);
    }

    fn note(&mut self, block: &[u8], addr: u64) -> Result<()> {
        for trailer in Trailer::decode_all(self.seed, block).into_iter().flatten() {
            self.enter(trailer, addr + BLOCK as u64)?;
        }
        Ok(())
    }

    /// Notes a trailer in the block that ends at `end`.
    fn enter(&mut self, trailer: Trailer, end: u64) -> Result<()> {
        if self.nodes.len() + self.copies.len() >= self.nodes_max {
            return Err(Error::Invalid(
                "the memory budget is too small for the nodes of this volume; give more with --memory",
            ));
        }
        if trailer.place.extent.end() == end {
            self.nodes.push(trailer);
        } else {
            self.copies.push((trailer, end));
        }
        Ok(())
    }

    /// Takes a record of the old table for the truth about its node.
    pub(crate) fn trust(&mut self, node: Trailer) {
        match self.nodes.binary_search_by_key(&node.id, |node| node.id) {
            Ok(at) => self.nodes[at] = node,
            Err(at) => self.nodes.insert(at, node),
        }
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

    /// The node `id`, and the places at which copies of it lie, the first one first.
    pub(crate) fn copies_of(&self, id: NodeId) -> Vec<Trailer> {
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
        let mut moved: Vec<Trailer> = moved.collect();
        moved.sort_unstable_by_key(|node| u64::MAX - node.opening);
        first.into_iter().chain(moved).collect()
    }
}

/// Whether a node has the checksum that its trailer tells.
fn is_whole(dev: &dyn Device, node: &Trailer) -> bool {
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

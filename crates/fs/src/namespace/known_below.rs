//! The objects below a directory that the kernel knows.

use std::collections::HashMap;
use std::sync::Arc;

use crate::format::ino::Ino;
use crate::namespace::inode::{Inode, Location, Placed, Table, each_placed};

/// A name that the kernel knows. The number of its directory is not given to another one as long as
/// this lives.
pub struct KnownName {
    /// The directory.
    pub dir: Ino,
    /// The name.
    pub name: Vec<u8>,
    /// The object of that name.
    pub ino: Ino,
    _held: Arc<Inode>,
}

/// The objects below a directory that the kernel knows.
#[derive(Default)]
pub struct KnownBelow {
    /// Their names, from the bottom up. Those of inodes with several names are not among them: the
    /// table does not have all their names.
    pub names: Vec<KnownName>,
    /// The numbers of inodes with several names, all of which lie below.
    pub shared: Vec<Ino>,
}

/// Depths of directories below a top; `None` for those elsewhere.
struct Depths<'a> {
    top: &'a Arc<Inode>,
    known: HashMap<u64, Option<usize>>,
}

impl Depths<'_> {
    /// The depth of a directory; the top has depth 0.
    fn of(&mut self, dir: &Arc<Inode>) -> Option<usize> {
        let (mut way, mut at) = (Vec::new(), Arc::clone(dir));
        let found = loop {
            if Arc::ptr_eq(&at, self.top) {
                break Some(0);
            }
            if let Some(known) = self.known.get(&at.ino.0) {
                break *known;
            }
            way.push(at.ino.0);
            let above = match &*at.location.read() {
                Location::Child { parent, .. } => Some(Arc::clone(parent)),
                _ => None,
            };
            match above {
                Some(above) => at = above,
                None => break None,
            }
        };
        let mut depth = found;
        while let Some(ino) = way.pop() {
            depth = depth.map(|depth| depth + 1);
            self.known.insert(ino, depth);
        }
        depth
    }
}

/// The objects below the directory `top` that are in memory. All inodes in memory are looked at;
/// `between` is called after some of them.
pub(crate) fn known_below(table: &Table, top: &Arc<Inode>, between: impl FnMut()) -> KnownBelow {
    // A child holds its directory. The table and the caller hold the top.
    if Arc::strong_count(top) <= 2 {
        return KnownBelow::default();
    }
    let known = HashMap::new();
    let mut depths = Depths { top, known };
    let (mut names, mut shared) = (Vec::new(), Vec::new());
    let each = |placed: Placed<'_>, ino| match placed {
        Placed::Name(parent, name) => {
            if let Some(depth) = depths.of(parent) {
                let known = KnownName {
                    dir: parent.ino,
                    name: name.to_vec(),
                    ino,
                    _held: Arc::clone(parent),
                };
                names.push((depth, known));
            }
        }
        Placed::Shared(root) => shared.extend(depths.of(root).map(|_| ino)),
    };
    each_placed(table, each, between);
    names.sort_by_key(|(depth, _)| std::cmp::Reverse(*depth));
    let names = names.into_iter().map(|(_, known)| known).collect();
    KnownBelow { names, shared }
}

/// The names in the directory `dir` itself of the inodes in memory with one name.
pub(crate) fn known_in(table: &Table, dir: &Arc<Inode>) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let each = |placed: Placed<'_>, _| match placed {
        Placed::Name(parent, name) if Arc::ptr_eq(parent, dir) => names.push(name.to_vec()),
        Placed::Name(..) | Placed::Shared(_) => {}
    };
    each_placed(table, each, || {});
    names
}

//! The connections of one volume that stand, for a process that ends them when this one is killed.
//!
//! The list begins with the mount of the volume. A connection is on it from the time before its first
//! request is answered until after its last one.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::mount::connection::Connection;

/// Number of the mount of the volume.
pub const LIVE: u64 = 0;

/// News of a connection. Each has a number that no other one of the volume gets.
pub enum Told<'a> {
    /// It begins.
    Begins(u64, &'a Connection),
    /// It has ended.
    Ends(u64),
}

type Tell = dyn Fn(Told<'_>) + Send + Sync;

/// The connections that stand.
#[derive(Default)]
pub(crate) struct Connections(Mutex<State>);

#[derive(Default)]
struct State {
    /// Number of the next one.
    next: u64,
    standing: BTreeMap<u64, Connection>,
    tell: Option<Box<Tell>>,
}

impl Connections {
    /// Adds a connection, if its number is known.
    pub(crate) fn add(self: &Arc<Self>, connection: Option<&Connection>) -> Standing {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        if let Some(connection) = connection {
            if let Some(tell) = &state.tell {
                tell(Told::Begins(number, connection));
            }
            state.standing.insert(number, connection.clone());
        }
        Standing {
            connections: Arc::clone(self),
            number,
        }
    }

    /// Has `tell` called for each connection that stands, and for each one that begins or ends from
    /// now on. It must not wait.
    pub(crate) fn tell_by(&self, tell: Box<Tell>) {
        let mut state = self.0.lock();
        for (number, connection) in &state.standing {
            tell(Told::Begins(*number, connection));
        }
        state.tell = Some(tell);
    }
}

/// A connection on the list, until this is dropped.
pub(crate) struct Standing {
    connections: Arc<Connections>,
    number: u64,
}

impl Standing {
    /// The list.
    pub(crate) fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// Its number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        let mut state = self.connections.0.lock();
        if state.standing.remove(&self.number).is_some()
            && let Some(tell) = &state.tell
        {
            tell(Told::Ends(self.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::mount::mountinfo::Device;

    #[test]
    fn each_connection_is_told_from_its_begin_to_its_end() {
        let seen = Connection::received(Device::parse(b"0:1").unwrap(), None, None);
        let connections = Arc::<Connections>::default();
        let live = connections.add(Some(&seen));
        let gone = connections.add(Some(&seen));
        drop(gone);
        let (sender, told) = channel();
        connections.tell_by(Box::new(move |one| {
            let line = match one {
                Told::Begins(number, _) => format!("+{number}"),
                Told::Ends(number) => format!("-{number}"),
            };
            sender.send(line).unwrap();
        }));
        let unknown = connections.add(None);
        let other = connections.add(Some(&seen));
        assert_eq!((unknown.number(), other.number()), (2, 3));
        drop((unknown, other, live));
        let told: Vec<_> = told.try_iter().collect();
        assert_eq!(told, ["+0", "+3", "-3", "-0"]);
    }
}

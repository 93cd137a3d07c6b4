//! The process that sent a request.

use ramet_fs::{Caller, Credentials};

use crate::protocol::Header;

/// The process that sent a request, by the header of the request.
#[derive(Clone, Copy)]
pub(crate) struct Requester {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
}

impl From<&Header> for Requester {
    fn from(header: &Header) -> Self {
        Self {
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
        }
    }
}

/// User and groups of a process. Supplementary groups come from the process table, and are empty
/// when the process cannot be seen.
pub(crate) fn caller_of(requester: Requester) -> Caller {
    let groups = if requester.uid == 0 {
        Vec::new()
    } else {
        groups_of(requester.pid)
    };
    Caller {
        uid: requester.uid,
        gid: requester.gid,
        groups,
    }
}

/// Groups and capability of a process, which decide on setuid and setgid of a file that the process
/// changes. A process that cannot be seen has `CAP_FSETID` only as uid 0, and no supplementary
/// groups.
pub(crate) fn credentials_of(requester: Requester) -> Credentials {
    credentials_in(status_of(requester.pid).as_deref(), requester)
}

fn credentials_in(status: Option<&str>, requester: Requester) -> Credentials {
    const CAP_FSETID: u64 = 1 << 4;
    let capabilities =
        status.and_then(|status| u64::from_str_radix(field(status, "CapEff:").trim(), 16).ok());
    let mut groups = status.map(groups_in).unwrap_or_default();
    groups.push(requester.gid);
    Credentials {
        has_fsetid: capabilities.map_or(requester.uid == 0, |all| all & CAP_FSETID != 0),
        groups,
    }
}

/// The text of `/proc/PID/status`, if the process table shows the process.
fn status_of(pid: u32) -> Option<String> {
    if pid == 0 {
        return None;
    }
    std::fs::read_to_string(format!("/proc/{pid}/status")).ok()
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let mut lines = status.lines();
    lines
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default()
}

fn groups_in(status: &str) -> Vec<u32> {
    field(status, "Groups:")
        .split_whitespace()
        .filter_map(|group| group.parse().ok())
        .collect()
}

fn groups_of(pid: u32) -> Vec<u32> {
    status_of(pid).as_deref().map(groups_in).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_this_process_are_found() {
        let expected: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .into_iter()
            .map(rustix::process::Gid::as_raw)
            .collect();
        assert_eq!(groups_of(std::process::id()), expected);
        assert!(groups_of(0).is_empty());
        let requester = |uid, pid| Requester { uid, gid: 7, pid };
        let here = credentials_of(requester(0, std::process::id()));
        assert_eq!(here.groups.split_last(), Some((&7, &expected[..])));
        let unseen = |uid| credentials_of(requester(uid, 0));
        assert_eq!(unseen(5).groups, [7]);
        assert_eq!([0, 5].map(|uid| unseen(uid).has_fsetid), [true, false]);
    }

    #[test]
    fn capabilities_decide_about_fsetid_and_the_user_does_not() {
        let told = |uid, capabilities| {
            let status = format!("Name:\tx\nGroups:\t4 24 \nCapEff:\t{capabilities}\n");
            let requester = Requester {
                uid,
                gid: 7,
                pid: 1,
            };
            credentials_in(Some(&status), requester)
        };
        let root = told(0, "00000000a80425eb");
        assert_eq!((root.has_fsetid, root.groups), (false, vec![4, 24, 7]));
        assert!(told(5, "0000000000000010").has_fsetid);
    }
}

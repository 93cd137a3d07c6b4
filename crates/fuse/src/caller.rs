//! Who sent a request.

use ramet_fs::Caller;

/// The process that sent a request, as the request tells.
#[derive(Clone, Copy)]
pub(crate) struct Asker {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
}

/// User and groups of a process. Supplementary groups come from the process
/// table and count as none when the process cannot be seen.
pub(crate) fn caller(asker: Asker) -> Caller {
    let groups = if asker.uid == 0 {
        Vec::new()
    } else {
        groups_of(asker.pid)
    };
    Caller {
        uid: asker.uid,
        gid: asker.gid,
        groups,
    }
}

fn groups_of(pid: u32) -> Vec<u32> {
    if pid == 0 {
        return Vec::new();
    }
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
        return Vec::new();
    };
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    line.unwrap_or_default()
        .split_whitespace()
        .filter_map(|group| group.parse().ok())
        .collect()
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
    }
}

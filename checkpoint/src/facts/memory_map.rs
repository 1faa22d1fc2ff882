//! Parses the memory map of a process (proc_pid_maps(5)). Finds the files that the process needs,
//! and the mappings that no engine can migrate.

use std::path::PathBuf;

/// How one mapping of a process, which is one line of the memory map, affects a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mapping {
    /// A private file mapping: the process may read the content at any time, without a descriptor.
    Private(PathBuf),
    /// A shared file mapping: the content changes when other processes write the file.
    Shared(PathBuf),
    /// A mapping that cannot be migrated. The value is its description for messages.
    Unsupported(String),
}

/// Mappings that cannot be migrated: the prefix of the mapping's name, and a description.
const UNSUPPORTED_MAPPINGS: [(&str, &str); 5] = [
    ("/SYSV", "System V shared memory"),
    ("anon_inode:[io_uring]", "an io_uring ring"),
    ("anon_inode:[perf_event]", "a perf event"),
    ("/secretmem", "secret memory (memfd_secret)"),
    ("anon_inode:", "a mapping that no engine can migrate"),
];

/// Directory of named POSIX shared memory and semaphores. They exist only in the memory of one
/// host.
pub(super) const SHARED_MEMORY_DIR: &str = "/dev/shm/";

/// Returns the description, for messages, of the POSIX shared memory with this path. Its name still
/// exists on this host; a file with the same name and length on another host would have other
/// content.
pub(super) fn describe_posix_memory(path: &str) -> String {
    format!("POSIX shared memory ({path}), which exists on this host only")
}

/// Parses the text of /proc/PID/maps. Omits anonymous memory and deleted files, which the images
/// contain.
pub(super) fn parse_maps(maps: &str) -> Vec<Mapping> {
    maps.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mapping> {
    // Format of a line: address perms offset device inode path. The path may contain spaces.
    let mut rest = line;
    let mut fields = [""; 5];
    for field in &mut fields {
        let trimmed_rest = rest.trim_start();
        let field_end = trimmed_rest.find(' ').unwrap_or(trimmed_rest.len());
        (*field, rest) = trimmed_rest.split_at(field_end);
    }
    let path = rest.trim_start();
    if let Some((_, what)) = UNSUPPORTED_MAPPINGS
        .iter()
        .find(|(start, _)| path.starts_with(start))
    {
        return Some(Mapping::Unsupported((*what).to_string()));
    }
    // The names of deleted files, memfds and shared anonymous mappings end with "(deleted)". The
    // images contain the content of these mappings.
    if !path.starts_with('/') || path.ends_with(" (deleted)") {
        return None;
    }
    if path.starts_with(SHARED_MEMORY_DIR) {
        return Some(Mapping::Unsupported(describe_posix_memory(path)));
    }
    if path.starts_with("/dev/") {
        let is_zero_device = path == "/dev/zero";
        return (!is_zero_device)
            .then(|| Mapping::Unsupported(format!("a mapping of the device {path}")));
    }
    let is_shared = fields[1].ends_with('s');
    Some(if is_shared {
        Mapping::Shared(path.into())
    } else {
        Mapping::Private(path.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files and mappings that cannot be migrated are found; anonymous memory is skipped.
    #[test]
    fn map_lines_are_classified() {
        let maps = "\
5566f000-5567f000 r-xp 00000000 fe:01 1234                       /usr/bin/a program
5567f000-55680000 rw-p 00010000 fe:01 1234                       /usr/bin/a program
7f000000-7f100000 rw-s 00000000 00:1a 77                         /data/shared table
7f200000-7f300000 rw-p 00000000 00:00 0                          [heap]
7f300000-7f400000 rw-p 00000000 00:00 0 \n\
7f400000-7f500000 rw-s 00000000 00:01 5                          /memfd:x (deleted)
7f400000-7f500000 rw-s 00000000 00:18 6                          /dev/shm/sem.mine (deleted)
7f400000-7f500000 rw-s 00000000 00:18 6                          /dev/shm/table
7f500000-7f600000 rw-s 00000000 00:01 9                          /SYSV00000000 (deleted)
7f600000-7f700000 rw-s 00000000 00:01 9                          anon_inode:[io_uring]
7f700000-7f800000 rw-s 00000000 00:05 9                          /dev/dri/card0
ffff0000-ffff1000 r-xp 00000000 00:00 0                          [vdso]
";
        let expected = [
            Mapping::Private("/usr/bin/a program".into()),
            Mapping::Private("/usr/bin/a program".into()),
            Mapping::Shared("/data/shared table".into()),
            Mapping::Unsupported(
                "POSIX shared memory (/dev/shm/table), which exists on this host only".into(),
            ),
            Mapping::Unsupported("System V shared memory".into()),
            Mapping::Unsupported("an io_uring ring".into()),
            Mapping::Unsupported("a mapping of the device /dev/dri/card0".into()),
        ];
        assert_eq!(parse_maps(maps), expected);
    }
}

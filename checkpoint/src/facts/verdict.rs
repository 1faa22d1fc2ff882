//! The target's verdict on a task: a pure function of the task's facts and the properties of a
//! host.

use sempa_proto::migration::{FileRequirement, Refusal, RequiredFile, TaskFacts, Verdict};
use std::io;
use std::path::Path;

/// Memory in bytes that must stay free in addition to the memory of the task.
pub const MEMORY_SLACK_BYTES: u64 = 32 << 20;

/// A file on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundFile {
    pub bytes: u64,
    pub is_directory: bool,
}

/// Properties of a host on which its verdict depends.
pub trait HostProperties {
    /// Processor features, as named in /proc/cpuinfo.
    fn cpu_features(&self) -> Vec<String>;
    /// Kernel features, as named in [`TaskFacts::kernel_features`].
    fn kernel_features(&self) -> Vec<String>;
    /// Kernel release, for messages.
    fn kernel(&self) -> String;
    /// Number of further threads that may be created; `None` if unlimited.
    fn threads_available(&self) -> Option<u64>;
    /// Memory in bytes that new processes can use without swapping.
    fn memory_available_bytes(&self) -> u64;
    /// Number of bytes of the available memory that are reserved for accepted tasks whose memory
    /// has not completely arrived.
    fn memory_reserved_bytes(&self) -> u64;
    /// Returns the properties of the file at this path.
    ///
    /// # Errors
    /// The system's error; usually the file does not exist.
    fn find_file(&self, path: &Path) -> io::Result<FoundFile>;
    /// Returns the BLAKE3 hash of a file's content in hexadecimal digits.
    ///
    /// # Errors
    /// The file cannot be read.
    fn hash(&self, path: &Path) -> io::Result<String>;
    /// Returns why no file could be created at this path for a task of this user; `None` if it
    /// could.
    fn creation_obstacle(&self, path: &Path, uid: u32) -> Option<String>;
}

/// Returns all reasons why this host cannot run a task with these facts; empty if it can. Does not
/// check whether the host has an engine.
pub fn judge_task(facts: &TaskFacts, host: &dyn HostProperties) -> Verdict {
    let mut verdict = Verdict::new();
    let missing_of = |required: &[String], has: &[String]| -> Vec<String> {
        required
            .iter()
            .filter(|feature| !has.contains(feature))
            .cloned()
            .collect()
    };
    // The C library selects its routines by processor features when the program starts. After a
    // migration a missing feature would crash the program.
    let missing = missing_of(&facts.cpu_features, &host.cpu_features());
    if !missing.is_empty() {
        verdict.push(Refusal::CpuFeatures { missing });
    }
    // Programs also test for kernel features only once, at their start.
    let missing = missing_of(&facts.kernel_features, &host.kernel_features());
    if !missing.is_empty() {
        verdict.push(Refusal::KernelFeatures {
            missing,
            source: facts.kernel.to_string(),
            target: host.kernel(),
        });
    }
    let (needed, available) = (
        facts.resident_bytes.saturating_add(MEMORY_SLACK_BYTES),
        host.memory_available_bytes(),
    );
    let reserved = host.memory_reserved_bytes();
    if available < needed {
        verdict.push(Refusal::Memory {
            need: needed,
            have: available,
        });
    } else if available.saturating_sub(reserved) < needed {
        verdict.push(Refusal::MemoryReserved {
            need: needed,
            have: available,
            reserved,
        });
    }
    let needed = u64::from(facts.threads);
    if let Some(available) = host
        .threads_available()
        .filter(|available| *available < needed)
    {
        verdict.push(Refusal::Threads {
            need: needed,
            have: available,
        });
    }
    let file_refusals = facts.files.iter().filter_map(|file| {
        let why = difference(file, facts.uid, host)?;
        Some(Refusal::File {
            path: file.path.clone(),
            why,
        })
    });
    verdict.extend(file_refusals);
    verdict
}

fn difference(file: &RequiredFile, uid: u32, host: &dyn HostProperties) -> Option<String> {
    let found = match host.find_file(&file.path) {
        Ok(found) => found,
        Err(e)
            if e.kind() == io::ErrorKind::NotFound && file.requirement.is_copied_if_missing() =>
        {
            let why = host.creation_obstacle(&file.path, uid)?;
            return Some(format!(
                "it does not exist on the target, and cannot be carried there: {why}"
            ));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Some("it does not exist on the target".into());
        }
        Err(e) => return Some(format!("it cannot be looked at on the target: {e}")),
    };
    let length = (found.bytes != file.bytes).then(|| {
        format!(
            "it has {} bytes at the source, {} on the target",
            file.bytes, found.bytes
        )
    });
    match &file.requirement {
        FileRequirement::Directory => {
            (!found.is_directory).then(|| "it is no directory on the target".into())
        }
        FileRequirement::ExistsOrCopied | FileRequirement::LengthOrCopied if found.is_directory => {
            Some("it is a directory on the target".into())
        }
        FileRequirement::Exists | FileRequirement::ExistsOrCopied => {
            length.filter(|_| found.bytes < file.bytes)
        }
        FileRequirement::Length | FileRequirement::LengthOrCopied => length,
        FileRequirement::Content(expected) => length.or_else(|| match host.hash(&file.path) {
            Ok(hash) => {
                (hash != *expected).then(|| "its content is another one on the target".into())
            }
            Err(e) => Some(format!("it cannot be read on the target: {e}")),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    struct FakeHost {
        features: &'static str,
        kernel_features: &'static str,
        memory: u64,
        reserved: u64,
        threads: Option<u64>,
        files: BTreeMap<&'static str, (FoundFile, &'static str)>,
    }

    impl HostProperties for FakeHost {
        fn cpu_features(&self) -> Vec<String> {
            self.features.split(' ').map(String::from).collect()
        }
        fn kernel_features(&self) -> Vec<String> {
            self.kernel_features.split(' ').map(String::from).collect()
        }
        fn kernel(&self) -> String {
            "6.1".into()
        }
        fn threads_available(&self) -> Option<u64> {
            self.threads
        }
        fn memory_available_bytes(&self) -> u64 {
            self.memory
        }
        fn memory_reserved_bytes(&self) -> u64 {
            self.reserved
        }
        fn find_file(&self, path: &Path) -> io::Result<FoundFile> {
            let file = self.files.get(path.to_str().expect("text"));
            file.map(|(found, _)| *found)
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
        }
        fn hash(&self, path: &Path) -> io::Result<String> {
            Ok(self.files[path.to_str().expect("text")].1.to_string())
        }
        fn creation_obstacle(&self, path: &Path, uid: u32) -> Option<String> {
            (!path.starts_with("/data") || uid != 1000).then(|| "its folder: EACCES".into())
        }
    }

    fn host() -> FakeHost {
        let file = |bytes, hash| {
            (
                FoundFile {
                    bytes,
                    is_directory: false,
                },
                hash,
            )
        };
        FakeHost {
            features: "avx2 fma sse2",
            kernel_features: "clone3 openat2 rseq",
            memory: 1 << 30,
            reserved: 0,
            threads: None,
            files: BTreeMap::from([
                ("/bin/prog", file(100, "aa")),
                ("/data/in", file(7, "")),
                ("/data/log", file(9, "")),
                (
                    "/data",
                    (
                        FoundFile {
                            bytes: 4096,
                            is_directory: true,
                        },
                        "",
                    ),
                ),
            ]),
        }
    }

    fn required_file(path: &str, bytes: u64, must: FileRequirement) -> RequiredFile {
        RequiredFile {
            path: path.into(),
            bytes,
            requirement: must,
        }
    }

    fn facts() -> TaskFacts {
        TaskFacts {
            program: "prog".into(),
            resident_bytes: 100 << 20,
            uid: 1000,
            cpu_features: vec!["fma".into(), "sse2".into()],
            kernel_features: vec!["clone3".into(), "rseq".into()],
            kernel: "6.8".into(),
            engine: "4.2.1".into(),
            threads: 3,
            files: vec![
                required_file("/bin/prog", 100, FileRequirement::Content("aa".into())),
                required_file("/data/in", 7, FileRequirement::Length),
                required_file("/data/log", 5, FileRequirement::Exists),
                required_file("/data", 0, FileRequirement::Directory),
            ],
            launch: None,
        }
    }

    /// A host that has all required features and resources accepts the task, even if its kernel has
    /// another release.
    #[test]
    fn sufficient_host_accepts_any_kernel_release() {
        assert_eq!(judge_task(&facts(), &host()), []);
        assert_eq!(
            judge_task(
                &facts(),
                &FakeHost {
                    threads: Some(3),
                    ..host()
                }
            ),
            []
        );
    }

    /// The verdict lists missing processor features, kernel features, memory and threads together.
    #[test]
    fn lacking_host_reports_all_reasons() {
        let here = FakeHost {
            features: "sse2",
            kernel_features: "openat2 rseq",
            memory: 50 << 20,
            threads: Some(2),
            ..host()
        };
        let expected = [
            Refusal::CpuFeatures {
                missing: vec!["fma".into()],
            },
            Refusal::KernelFeatures {
                missing: vec!["clone3".into()],
                source: "6.8".into(),
                target: "6.1".into(),
            },
            Refusal::Memory {
                need: (100 << 20) + MEMORY_SLACK_BYTES,
                have: 50 << 20,
            },
            Refusal::Threads { need: 3, have: 2 },
        ];
        assert_eq!(judge_task(&facts(), &here), expected);
    }

    /// Memory that is reserved for other tasks is not available.
    #[test]
    fn reserved_memory_is_not_available() {
        let room = (100 << 20) + MEMORY_SLACK_BYTES;
        let with = |reserved| judge_task(&facts(), &FakeHost { reserved, ..host() });
        assert_eq!(with((1 << 30) - room), []);
        let reserved = (1 << 30) - room + 1;
        assert_eq!(
            with(reserved),
            [Refusal::MemoryReserved {
                need: room,
                have: 1 << 30,
                reserved
            }]
        );
        let small = FakeHost {
            memory: 5,
            reserved,
            ..host()
        };
        assert_eq!(
            judge_task(&facts(), &small),
            [Refusal::Memory {
                need: room,
                have: 5
            }],
            "it would not do without them"
        );
    }

    /// A file that is copied to the target may be missing there if it can be created, but an
    /// existing one must match.
    #[test]
    fn copied_file_may_be_missing_but_not_different() {
        let with = |path: &str, bytes, must| TaskFacts {
            files: vec![required_file(path, bytes, must)],
            ..facts()
        };
        let say = |facts: &TaskFacts| match &judge_task(facts, &host())[..] {
            [] => String::new(),
            [Refusal::File { why, .. }] => why.clone(),
            other => panic!("{other:?}"),
        };
        use FileRequirement::{ExistsOrCopied, LengthOrCopied};
        assert_eq!(say(&with("/data/new", 5, LengthOrCopied)), "");
        assert_eq!(say(&with("/data/new", 5, ExistsOrCopied)), "");
        let there =
            "it does not exist on the target, and cannot be carried there: its folder: EACCES";
        assert_eq!(say(&with("/else/new", 5, LengthOrCopied)), there);
        assert_eq!(
            say(&TaskFacts {
                uid: 5,
                ..with("/data/new", 5, LengthOrCopied)
            }),
            there
        );
        assert_eq!(say(&with("/data/in", 7, LengthOrCopied)), "");
        let length = "it has 6 bytes at the source, 7 on the target";
        assert_eq!(say(&with("/data/in", 6, LengthOrCopied)), length);
        assert_eq!(
            say(&with("/data/log", 0, ExistsOrCopied)),
            "",
            "it is only appended to"
        );
        assert_eq!(
            say(&with("/data/in", 6, ExistsOrCopied)),
            "",
            "it has grown since"
        );
        assert_eq!(
            say(&with("/data/in", 9, ExistsOrCopied)),
            "it has 9 bytes at the source, 7 on the target"
        );
        assert_eq!(
            say(&with("/data", 4096, LengthOrCopied)),
            "it is a directory on the target"
        );
    }

    /// Every file that is missing or different on the target is listed.
    #[test]
    fn missing_and_different_files_are_listed() {
        let mut here = host();
        here.files.insert(
            "/bin/prog",
            (
                FoundFile {
                    bytes: 100,
                    is_directory: false,
                },
                "bb",
            ),
        );
        here.files.insert(
            "/data/in",
            (
                FoundFile {
                    bytes: 8,
                    is_directory: false,
                },
                "",
            ),
        );
        here.files.remove("/data/log");
        here.files.insert(
            "/data",
            (
                FoundFile {
                    bytes: 1,
                    is_directory: false,
                },
                "",
            ),
        );
        let wrong = |path: &str, why: &str| Refusal::File {
            path: path.into(),
            why: why.into(),
        };
        let expected = [
            wrong("/bin/prog", "its content is another one on the target"),
            wrong("/data/in", "it has 7 bytes at the source, 8 on the target"),
            wrong("/data/log", "it does not exist on the target"),
            wrong("/data", "it is no directory on the target"),
        ];
        assert_eq!(judge_task(&facts(), &here), expected);
    }
}

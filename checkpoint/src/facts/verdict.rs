//! The target's verdict on a task: a pure function of the task's facts and the properties of a
//! host.

use sempa_proto::migration::{FileRequirement, Refusal, RequiredFile, TaskFacts, Verdict};
use std::io;
use std::net::IpAddr;
use std::path::Path;

/// Memory in bytes that must stay free in addition to the memory of the task.
pub const MEMORY_SLACK_BYTES: u64 = 32 << 20;

/// A file on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundFile {
    pub bytes: u64,
    pub is_directory: bool,
}

/// The properties of a host that determine the host's verdict on a task.
pub trait HostProperties {
    /// Processor features, as named in /proc/cpuinfo.
    ///
    /// # Errors
    /// They cannot be read.
    fn cpu_features(&self) -> io::Result<Vec<String>>;
    /// Kernel features, as named in [`TaskFacts::kernel_features`].
    fn kernel_features(&self) -> Vec<String>;
    /// Kernel release, for messages.
    fn kernel(&self) -> String;
    /// Number of further threads that may be created; `None` if unlimited.
    ///
    /// # Errors
    /// A limit cannot be read.
    fn threads_available(&self) -> io::Result<Option<u64>>;
    /// The number below which all process and thread ids in a new PID namespace are.
    fn pid_limit(&self) -> u32;
    /// Memory in bytes that new processes can use without swapping.
    ///
    /// # Errors
    /// It cannot be read.
    fn memory_available_bytes(&self) -> io::Result<u64>;
    /// Number of bytes of the available memory that are reserved for accepted tasks whose memory
    /// has not completely arrived.
    fn memory_reserved_bytes(&self) -> u64;
    /// True if sockets can be bound to this address.
    fn has_address(&self, address: IpAddr) -> bool;
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
    /// Returns the reason why a task of the user `uid` could not create a file at this path; `None`
    /// if the task could create the file.
    fn creation_obstacle(&self, path: &Path, uid: u32) -> Option<String>;
}

/// Returns all reasons why this host cannot run a task with these facts. The list is empty if the
/// host can run the task. Does not check whether the host has an engine.
pub fn decide_verdict(facts: &TaskFacts, host: &dyn HostProperties) -> Verdict {
    let mut verdict = Verdict::new();
    let missing_features = |required: &[String], present: &[String]| -> Vec<String> {
        required
            .iter()
            .filter(|feature| !present.contains(feature))
            .cloned()
            .collect()
    };
    // The C library selects its routines by processor features when the program starts. After a
    // migration a missing feature would crash the program.
    match host.cpu_features() {
        Ok(features) => {
            let absent_features = missing_features(&facts.cpu_features, &features);
            if !absent_features.is_empty() {
                verdict.push(Refusal::CpuFeatures {
                    missing: absent_features,
                });
            }
        }
        Err(e) => verdict.push(unreadable("the target's processor features", &e)),
    }
    // Programs test for kernel features only once, at their start.
    let absent_features = missing_features(&facts.kernel_features, &host.kernel_features());
    if !absent_features.is_empty() {
        verdict.push(Refusal::KernelFeatures {
            missing: absent_features,
            source: facts.kernel_release.to_string(),
            target: host.kernel(),
        });
    }
    verdict.extend(memory_refusal(facts, host));
    let needed_amount = u64::from(facts.thread_count);
    match host.threads_available() {
        Ok(Some(available_amount)) if available_amount < needed_amount => {
            verdict.push(Refusal::Threads {
                need: needed_amount,
                have: available_amount,
            });
        }
        Ok(_) => {}
        Err(e) => verdict.push(unreadable("the target's limit of threads", &e)),
    }
    if facts.highest_pid >= host.pid_limit() {
        verdict.push(Refusal::ProcessIds {
            highest: facts.highest_pid,
            limit: host.pid_limit(),
        });
    }
    let missing_addresses = facts
        .addresses
        .iter()
        .filter(|address| !host.has_address(**address));
    verdict.extend(missing_addresses.map(|address| Refusal::Address { address: *address }));
    let file_refusals = facts.files.iter().filter_map(|file| {
        let reason = file_refusal_reason(file, facts.uid, host)?;
        Some(Refusal::File {
            path: file.path.clone(),
            why: reason,
        })
    });
    verdict.extend(file_refusals);
    verdict
}

/// Maximum number of files in the refusal of [`refused_open_files`].
const REFUSED_OPEN_FILES_MAX: usize = 8;

/// Returns which of the files that a task had open when it was stopped do not fulfill their
/// requirement on this host. This host had accepted the task, so the task has opened the file, or a
/// file has changed, since then.
pub fn refused_open_files(files: &[RequiredFile], host: &dyn HostProperties) -> Verdict {
    let refusals = files.iter().filter_map(|file| {
        let reason = file_refusal_reason(file, 0, host)?;
        Some(Refusal::File {
            path: file.path.clone(),
            why: format!(
                "{reason}; the task has opened it, or it has changed, since the target was asked"
            ),
        })
    });
    refusals.take(REFUSED_OPEN_FILES_MAX).collect()
}

/// Returns the refusal of a host that has too little memory for the task.
fn memory_refusal(facts: &TaskFacts, host: &dyn HostProperties) -> Option<Refusal> {
    let need = facts.memory_bytes.saturating_add(MEMORY_SLACK_BYTES);
    let have = match host.memory_available_bytes() {
        Ok(have) => have,
        Err(e) => return Some(unreadable("the target's free memory", &e)),
    };
    let reserved_bytes = host.memory_reserved_bytes();
    if have < need {
        Some(Refusal::Memory { need, have })
    } else if have.saturating_sub(reserved_bytes) < need {
        Some(Refusal::MemoryReserved {
            need,
            have,
            reserved_bytes,
        })
    } else {
        None
    }
}

/// Returns the refusal because a property cannot be read.
pub(super) fn unreadable(property: &str, error: &io::Error) -> Refusal {
    Refusal::Unreadable {
        property: property.into(),
        why: error.to_string(),
    }
}

/// Returns the reason why the host does not fulfill the requirement for this file; `None` if the
/// host fulfills it.
fn file_refusal_reason(file: &RequiredFile, uid: u32, host: &dyn HostProperties) -> Option<String> {
    let file_on_host = match host.find_file(&file.path) {
        Ok(file_on_host) => file_on_host,
        Err(e)
            if e.kind() == io::ErrorKind::NotFound && file.requirement.is_copied_if_missing() =>
        {
            let reason = host.creation_obstacle(&file.path, uid)?;
            return Some(format!(
                "it does not exist on the target and cannot be copied there: {reason}"
            ));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Some("it does not exist on the target".into());
        }
        Err(e) => return Some(format!("it cannot be accessed on the target: {e}")),
    };
    let length_difference = (file_on_host.bytes != file.bytes).then(|| {
        format!(
            "it has {} bytes at the source, {} on the target",
            file.bytes, file_on_host.bytes
        )
    });
    match &file.requirement {
        FileRequirement::Directory => {
            (!file_on_host.is_directory).then(|| "it is not a directory on the target".into())
        }
        FileRequirement::ExistsOrCopy | FileRequirement::LengthOrCopy
            if file_on_host.is_directory =>
        {
            Some("it is a directory on the target".into())
        }
        FileRequirement::Exists | FileRequirement::ExistsOrCopy => {
            length_difference.filter(|_| file_on_host.bytes < file.bytes)
        }
        FileRequirement::Length | FileRequirement::LengthOrCopy => length_difference,
        FileRequirement::Content(expected) => {
            length_difference.or_else(|| match host.hash(&file.path) {
                Ok(hash) => (hash != *expected).then(|| "its content differs on the target".into()),
                Err(e) => Some(format!("it cannot be read on the target: {e}")),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    struct FakeHost {
        /// `None` if the features cannot be read.
        cpu_features: Option<&'static str>,
        kernel_features: &'static str,
        memory_bytes: u64,
        reserved_bytes: u64,
        threads: Option<u64>,
        pid_limit: u32,
        files: BTreeMap<&'static str, (FoundFile, &'static str)>,
    }

    impl HostProperties for FakeHost {
        fn cpu_features(&self) -> io::Result<Vec<String>> {
            let features = self
                .cpu_features
                .ok_or(io::Error::from_raw_os_error(libc::EMFILE))?;
            Ok(features.split(' ').map(String::from).collect())
        }
        fn kernel_features(&self) -> Vec<String> {
            self.kernel_features.split(' ').map(String::from).collect()
        }
        fn kernel(&self) -> String {
            "6.1".into()
        }
        fn threads_available(&self) -> io::Result<Option<u64>> {
            Ok(self.threads)
        }
        fn pid_limit(&self) -> u32 {
            self.pid_limit
        }
        fn memory_available_bytes(&self) -> io::Result<u64> {
            Ok(self.memory_bytes)
        }
        fn has_address(&self, address: IpAddr) -> bool {
            address.is_loopback()
        }
        fn memory_reserved_bytes(&self) -> u64 {
            self.reserved_bytes
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
            (!path.starts_with("/data") || uid != 1000).then(|| "its directory: EACCES".into())
        }
    }

    fn sufficient_host() -> FakeHost {
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
            cpu_features: Some("avx2 fma sse2"),
            kernel_features: "clone3 openat2 rseq",
            memory_bytes: 1 << 30,
            reserved_bytes: 0,
            threads: None,
            pid_limit: 40_003,
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

    fn required_file(path: &str, bytes: u64, requirement: FileRequirement) -> RequiredFile {
        RequiredFile {
            path: path.into(),
            bytes,
            requirement,
        }
    }

    fn task_facts() -> TaskFacts {
        TaskFacts {
            program: "prog".into(),
            memory_bytes: 100 << 20,
            uid: 1000,
            cpu_features: vec!["fma".into(), "sse2".into()],
            kernel_features: vec!["clone3".into(), "rseq".into()],
            kernel_release: "6.8".into(),
            engine_version: "4.2.1".into(),
            thread_count: 3,
            highest_pid: 40_002,
            files: vec![
                required_file("/bin/prog", 100, FileRequirement::Content("aa".into())),
                required_file("/data/in", 7, FileRequirement::Length),
                required_file("/data/log", 5, FileRequirement::Exists),
                required_file("/data", 0, FileRequirement::Directory),
            ],
            launch: None,
            addresses: vec![IpAddr::from([127, 0, 0, 1])],
        }
    }

    /// What cannot be read is not taken for what is missing.
    #[test]
    fn unreadable_features_are_no_missing_ones() {
        let host = FakeHost {
            cpu_features: None,
            ..sufficient_host()
        };
        let verdict = decide_verdict(&task_facts(), &host);
        let [Refusal::Unreadable { property, why }] = &verdict[..] else {
            panic!("{verdict:?}");
        };
        assert_eq!(property, "the target's processor features");
        assert!(why.starts_with("Too many open files"), "{why}");
    }

    /// An address of the task's sockets that the host lacks is named.
    #[test]
    fn missing_address_is_named() {
        let address = IpAddr::from([10, 0, 0, 1]);
        let facts = TaskFacts {
            addresses: vec![IpAddr::from([127, 0, 0, 1]), address],
            ..task_facts()
        };
        assert_eq!(
            decide_verdict(&facts, &sufficient_host()),
            [Refusal::Address { address }]
        );
    }

    /// A host that has all required features and resources accepts the task, even if its kernel has
    /// another release.
    #[test]
    fn sufficient_host_accepts_any_kernel_release() {
        assert_eq!(decide_verdict(&task_facts(), &sufficient_host()), []);
        assert_eq!(
            decide_verdict(
                &task_facts(),
                &FakeHost {
                    threads: Some(3),
                    ..sufficient_host()
                }
            ),
            []
        );
    }

    /// The verdict lists missing processor features, kernel features, memory, threads and process
    /// ids together.
    #[test]
    fn lacking_host_reports_all_reasons() {
        let lacking_host = FakeHost {
            cpu_features: Some("sse2"),
            kernel_features: "openat2 rseq",
            memory_bytes: 50 << 20,
            threads: Some(2),
            pid_limit: 40_002,
            ..sufficient_host()
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
            Refusal::ProcessIds {
                highest: 40_002,
                limit: 40_002,
            },
        ];
        assert_eq!(decide_verdict(&task_facts(), &lacking_host), expected);
    }

    /// Memory that is reserved for other tasks is not available.
    #[test]
    fn reserved_memory_is_not_available() {
        let needed_bytes = (100 << 20) + MEMORY_SLACK_BYTES;
        let verdict_with = |reserved| {
            decide_verdict(
                &task_facts(),
                &FakeHost {
                    reserved_bytes: reserved,
                    ..sufficient_host()
                },
            )
        };
        assert_eq!(verdict_with((1 << 30) - needed_bytes), []);
        let reserved = (1 << 30) - needed_bytes + 1;
        assert_eq!(
            verdict_with(reserved),
            [Refusal::MemoryReserved {
                need: needed_bytes,
                have: 1 << 30,
                reserved_bytes: reserved
            }]
        );
        let small_host = FakeHost {
            memory_bytes: 5,
            reserved_bytes: reserved,
            ..sufficient_host()
        };
        assert_eq!(
            decide_verdict(&task_facts(), &small_host),
            [Refusal::Memory {
                need: needed_bytes,
                have: 5
            }],
            "it would not do without them"
        );
    }

    /// A file that is copied to the target may be missing there if it can be created. A file that
    /// already exists there must have the required properties.
    #[test]
    fn copied_file_may_be_missing_but_not_different() {
        let facts_with_file = |path: &str, bytes, requirement| TaskFacts {
            files: vec![required_file(path, bytes, requirement)],
            ..task_facts()
        };
        let refusal_reason = |facts: &TaskFacts| match &decide_verdict(facts, &sufficient_host())[..]
        {
            [] => String::new(),
            [Refusal::File { why, .. }] => why.clone(),
            other => panic!("{other:?}"),
        };
        use FileRequirement::{ExistsOrCopy, LengthOrCopy};
        assert_eq!(
            refusal_reason(&facts_with_file("/data/new", 5, LengthOrCopy)),
            ""
        );
        assert_eq!(
            refusal_reason(&facts_with_file("/data/new", 5, ExistsOrCopy)),
            ""
        );
        let not_creatable =
            "it does not exist on the target and cannot be copied there: its directory: EACCES";
        assert_eq!(
            refusal_reason(&facts_with_file("/else/new", 5, LengthOrCopy)),
            not_creatable
        );
        assert_eq!(
            refusal_reason(&TaskFacts {
                uid: 5,
                ..facts_with_file("/data/new", 5, LengthOrCopy)
            }),
            not_creatable
        );
        assert_eq!(
            refusal_reason(&facts_with_file("/data/in", 7, LengthOrCopy)),
            ""
        );
        let length_difference = "it has 6 bytes at the source, 7 on the target";
        assert_eq!(
            refusal_reason(&facts_with_file("/data/in", 6, LengthOrCopy)),
            length_difference
        );
        assert_eq!(
            refusal_reason(&facts_with_file("/data/log", 0, ExistsOrCopy)),
            "",
            "it is only appended to"
        );
        assert_eq!(
            refusal_reason(&facts_with_file("/data/in", 6, ExistsOrCopy)),
            "",
            "it has grown since"
        );
        assert_eq!(
            refusal_reason(&facts_with_file("/data/in", 9, ExistsOrCopy)),
            "it has 9 bytes at the source, 7 on the target"
        );
        assert_eq!(
            refusal_reason(&facts_with_file("/data", 4096, LengthOrCopy)),
            "it is a directory on the target"
        );
    }

    /// Every file that is missing or different on the target is listed.
    #[test]
    fn missing_and_different_files_are_listed() {
        let mut other_host = sufficient_host();
        other_host.files.insert(
            "/bin/prog",
            (
                FoundFile {
                    bytes: 100,
                    is_directory: false,
                },
                "bb",
            ),
        );
        other_host.files.insert(
            "/data/in",
            (
                FoundFile {
                    bytes: 8,
                    is_directory: false,
                },
                "",
            ),
        );
        other_host.files.remove("/data/log");
        other_host.files.insert(
            "/data",
            (
                FoundFile {
                    bytes: 1,
                    is_directory: false,
                },
                "",
            ),
        );
        let file_refusal = |path: &str, reason: &str| Refusal::File {
            path: path.into(),
            why: reason.into(),
        };
        let expected = [
            file_refusal("/bin/prog", "its content differs on the target"),
            file_refusal("/data/in", "it has 7 bytes at the source, 8 on the target"),
            file_refusal("/data/log", "it does not exist on the target"),
            file_refusal("/data", "it is not a directory on the target"),
        ];
        assert_eq!(decide_verdict(&task_facts(), &other_host), expected);
    }
}

//! Parser for host file lines and the host names of `pvm_addhosts`: `name option…`, with PVM's
//! options and prefixes.
//!
//! | Prefix | Meaning |
//! | --- | --- |
//! | `*` | the line sets defaults for the following lines |
//! | `&` | the daemon is not started now; the options apply when the host is added later |
//! | `$` | accepted, without effect |

use super::HostPlan;
use sempa_proto::{HostId, PvmError};
use std::collections::BTreeMap;

/// Largest number of bytes in one line.
pub(super) const LINE_BYTES_MAX: usize = 4096;
/// Relative speed of a host for which the user specifies none.
const SPEED_DEFAULT: i32 = 1000;

type LineError = (PvmError, String);

/// Options on a line; `None` for an option that is not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HostOptions {
    login: Option<String>,
    command: Option<String>,
    search_path: Option<String>,
    work_dir: Option<String>,
    pub(super) speed: Option<i32>,
    contact: Option<String>,
    start_option: Option<String>,
    debugger: Option<String>,
}

impl HostOptions {
    /// Takes from `defaults` each option that is `None` in these options.
    fn with_defaults(self, defaults: &Self) -> Self {
        Self {
            login: self.login.or_else(|| defaults.login.clone()),
            command: self.command.or_else(|| defaults.command.clone()),
            search_path: self.search_path.or_else(|| defaults.search_path.clone()),
            work_dir: self.work_dir.or_else(|| defaults.work_dir.clone()),
            speed: self.speed.or(defaults.speed),
            contact: self.contact.or_else(|| defaults.contact.clone()),
            start_option: self.start_option.or_else(|| defaults.start_option.clone()),
            debugger: self.debugger.or_else(|| defaults.debugger.clone()),
        }
    }

    /// Returns the plan for a host with these options.
    fn into_plan(self, name: String, id: HostId) -> HostPlan {
        HostPlan {
            id,
            contact: self.contact.unwrap_or_else(|| name.clone()),
            name,
            login: self.login,
            command: self.command,
            search_path: self.search_path,
            work_dir: self.work_dir,
            speed: self.speed.unwrap_or(SPEED_DEFAULT),
            start_option: self.start_option,
            debugger: self.debugger,
        }
    }
}

/// Content of one line of the host file.
#[derive(Debug, PartialEq, Eq)]
enum ParsedLine {
    Empty,
    Defaults(HostOptions),
    Host {
        name: String,
        options: HostOptions,
        must_start: bool,
    },
}

/// Options of the hosts in the host file. They also apply when a host is added later.
#[derive(Debug, Default)]
pub(super) struct HostFile {
    hosts: BTreeMap<String, HostOptions>,
    defaults: HostOptions,
}

impl HostFile {
    /// Parses the lines of a host file. Returns the host file, the names of the hosts to start
    /// immediately, and each invalid line with the reason.
    pub(super) fn parse_lines(
        lines: &[String],
        own_name: &str,
    ) -> (Self, Vec<String>, Vec<(String, String)>) {
        let (mut host_file, mut hosts_to_start, mut invalid_lines) =
            (Self::default(), Vec::new(), Vec::new());
        for line in lines {
            match parse_line(line) {
                Ok(ParsedLine::Empty) => {}
                Ok(ParsedLine::Defaults(options)) => host_file.defaults = options,
                Ok(ParsedLine::Host {
                    name,
                    options,
                    must_start,
                }) => {
                    host_file
                        .hosts
                        .insert(name.clone(), options.with_defaults(&host_file.defaults));
                    if must_start && name != own_name {
                        hosts_to_start.push(name);
                    }
                }
                Err((_, reason)) => invalid_lines.push((line.clone(), reason)),
            }
        }
        (host_file, hosts_to_start, invalid_lines)
    }

    /// Returns the options of a host, or the last defaults if the file does not contain the host.
    pub(super) fn options_of(&self, name: &str) -> &HostOptions {
        self.hosts.get(name).unwrap_or(&self.defaults)
    }

    /// Returns the plan for the host that a line describes. `id` becomes the index of the host.
    ///
    /// # Errors
    /// A PVM error code and a sentence for the user if the line is not valid or names no host.
    pub(super) fn plan(&self, line: &str, id: HostId) -> Result<HostPlan, LineError> {
        match parse_line(line)? {
            ParsedLine::Host { name, options, .. } => {
                let options = options.with_defaults(self.options_of(&name));
                Ok(options.into_plan(name, id))
            }
            ParsedLine::Empty | ParsedLine::Defaults(_) => {
                Err((PvmError::BadParam, format!("{line:?} names no host")))
            }
        }
    }
}

/// Returns the plan for the master itself, from its own line in the host file or from the last
/// defaults.
pub fn master_plan(lines: &[String], own_name: &str) -> HostPlan {
    let (host_file, ..) = HostFile::parse_lines(lines, own_name);
    host_file
        .options_of(own_name)
        .clone()
        .into_plan(own_name.to_string(), HostId::MASTER)
}

fn parse_line(line: &str) -> Result<ParsedLine, LineError> {
    let line_error = |reason: String| (PvmError::BadParam, reason);
    if line.len() > LINE_BYTES_MAX {
        return Err(line_error(format!(
            "it is longer than {LINE_BYTES_MAX} bytes"
        )));
    }
    let mut words = line
        .split('#')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    let Some(first_word) = words.next() else {
        return Ok(ParsedLine::Empty);
    };
    let mut options = HostOptions::default();
    // Spaces may separate a prefix from the name.
    let (prefix, mut name) = match first_word.chars().next() {
        Some(c @ ('&' | '$' | '*')) => (Some(c), first_word[1..].to_string()),
        _ => (None, first_word.to_string()),
    };
    if matches!(prefix, Some('&' | '$')) && name.is_empty() {
        name = words.next().unwrap_or_default().to_string();
    }
    if prefix != Some('*') && (name.is_empty() || name.starts_with('-') || name.contains('=')) {
        return Err(line_error(format!("{name:?} is not the name of a host")));
    }
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let value = value.to_string();
        match key {
            "lo" if value.starts_with('-') => {
                return Err(line_error(format!("{value:?} is not a login name")));
            }
            "ip" if value.starts_with('-') => {
                return Err(line_error(format!("{value:?} is not an address")));
            }
            "lo" => options.login = Some(value),
            "dx" => options.command = Some(value),
            "ep" => options.search_path = Some(value),
            "wd" => options.work_dir = Some(value),
            "ip" => options.contact = Some(value),
            "sp" => {
                options.speed = Some(
                    value
                        .parse()
                        .map_err(|_| line_error(format!("sp={value} is not a number")))?,
                )
            }
            "bx" => options.debugger = Some(value),
            "so" => options.start_option = Some(value),
            // Ignored, because all hosts share the name of the virtual machine.
            "id" => {}
            _ => {
                return Err(line_error(format!(
                    "{word:?} is not a host option; the options are lo= dx= ep= wd= sp= ip= so= bx= id="
                )));
            }
        }
    }
    Ok(match prefix {
        Some('*') => ParsedLine::Defaults(options),
        prefix => ParsedLine::Host {
            name,
            options,
            must_start: prefix != Some('&'),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(file: &HostFile, line: &str) -> Result<HostPlan, LineError> {
        file.plan(line, HostId::MASTER)
    }

    /// Options of a line override those of the host file, and these override the defaults.
    #[test]
    fn line_options_override_file_and_defaults() {
        let lines = [
            "# all",
            "* dx=/opt/pvmd sp=500",
            "h1",
            "&h2 lo=anna sp=700",
            "$h3",
            "h4 zz=1",
            "",
        ]
        .map(String::from);
        let (file, hosts_to_start, invalid_lines) = HostFile::parse_lines(&lines, "h1");
        assert_eq!(hosts_to_start, ["h3"]);
        assert_eq!(invalid_lines.len(), 1);
        let h2_plan = plan(&file, "h2 wd=/tmp ip=10.0.0.2 # comment").expect("good");
        assert_eq!(
            (
                h2_plan.login.as_deref(),
                h2_plan.speed,
                h2_plan.contact.as_str()
            ),
            (Some("anna"), 700, "10.0.0.2")
        );
        assert_eq!(
            (h2_plan.command.as_deref(), h2_plan.work_dir.as_deref()),
            (Some("/opt/pvmd"), Some("/tmp"))
        );
        assert_eq!(plan(&file, "h9").expect("good").speed, 500);
    }

    /// The master uses the host file's line for its host. If there is no such line, it uses the
    /// last defaults in the file.
    #[test]
    fn master_plan_uses_own_line_or_last_defaults() {
        let lines = ["* wd=/a ep=/e", "h1 wd=/b ip=10.0.0.1 bx=/d", "* wd=/c"].map(String::from);
        let plan = master_plan(&lines, "h1");
        assert_eq!(
            (plan.work_dir.as_deref(), plan.search_path.as_deref()),
            (Some("/b"), Some("/e"))
        );
        assert_eq!(
            (plan.debugger.as_deref(), plan.contact.as_str()),
            (Some("/d"), "10.0.0.1")
        );
        let plan = master_plan(&lines, "h2");
        assert_eq!(
            (
                plan.work_dir.as_deref(),
                plan.search_path,
                plan.contact.as_str()
            ),
            (Some("/c"), None, "h2")
        );
    }

    /// A line that names no host, or that would pass options to ssh, is refused.
    #[test]
    fn lines_without_host_or_with_ssh_options_fail() {
        let file = HostFile::default();
        for line in [
            "",
            "#x",
            "* sp=1",
            "-oProxyCommand=x",
            "h lo=-l",
            "h ip=-x",
            "h sp=fast",
            "h foo",
            "&",
            "a=b",
        ] {
            assert_eq!(
                plan(&file, line).map_err(|e| e.0),
                Err(PvmError::BadParam),
                "{line}"
            );
        }
        let host_plan = plan(&file, "h so=pw bx=/opt/gdb").expect("good");
        assert_eq!(
            (
                host_plan.start_option.as_deref(),
                host_plan.debugger.as_deref()
            ),
            (Some("pw"), Some("/opt/gdb"))
        );
    }
}

//! The text with all groups that a server prints on request, in the format of PVM's server.

use sempa_proto::Tid;
use sempa_proto::group::{GroupInfo, GroupWait};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Returns the members of a group by host: the lowest tid and the number of members.
pub(crate) fn members_by_host(group: &GroupInfo) -> BTreeMap<Tid, (Tid, i32)> {
    let mut hosts = BTreeMap::new();
    for tid in group.members.iter().filter(|tid| **tid != Tid::NONE) {
        let (coordinator, count) = hosts.entry(tid.host_part()).or_insert((*tid, 0));
        *coordinator = (*tid).min(*coordinator);
        *count += 1;
    }
    hosts
}

/// Returns the text for the request to print all groups. `title` begins the text.
pub fn text(title: &str, server: Tid, groups: &[GroupInfo]) -> String {
    let mut text = format!("{title} {:#x}, {} groups:\n", server.raw(), groups.len());
    for group in groups {
        // Writing to a string cannot fail.
        let _ = write_group(&mut text, group);
    }
    text
}

fn write_group(text: &mut String, group: &GroupInfo) -> std::fmt::Result {
    let counts = |wait: &Option<GroupWait>| match wait {
        Some(wait) => (i64::from(wait.required_members), wait.waiting_members.len()),
        None => (-1, 0),
    };
    let (barrier_count, barrier_reached) = counts(&group.barrier);
    let (freeze_count, freeze_reached) = counts(&group.freeze);
    writeln!(
        text,
        "group: {}  size: {} barrier_count: {barrier_count} barrier_reached {barrier_reached}",
        String::from_utf8_lossy(&group.name),
        group.member_count()
    )?;
    writeln!(
        text,
        " sgroup_count: {freeze_count} sgroup_reached {freeze_reached}\n  Tids: "
    )?;
    for (instance, tid) in group.members.iter().enumerate() {
        if *tid != Tid::NONE {
            write!(text, "({instance},  {:#x}) ", tid.raw())?;
        }
    }
    text.push('\n');
    write_waiting(text, "tids waiting on barrier:", &group.barrier)?;
    write_waiting(text, "tids waiting on static formation:", &group.freeze)?;
    text.push_str("Host characterization:\n");
    for (host, (coordinator, count)) in members_by_host(group) {
        writeln!(
            text,
            "host {:x} - {count} procs, {:x} coord ",
            host.raw(),
            coordinator.raw()
        )?;
    }
    Ok(())
}

fn write_waiting(text: &mut String, title: &str, wait: &Option<GroupWait>) -> std::fmt::Result {
    let Some(wait) = wait else {
        return Ok(());
    };
    writeln!(text, "{title}")?;
    for tid in &wait.waiting_members {
        write!(text, "{:#x}  ", tid.raw())?;
    }
    text.push('\n');
    Ok(())
}

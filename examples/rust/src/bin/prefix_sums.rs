//! Computes the sums 1, 1 + 2, 1 + 2 + 3, … with a group of tasks that have one number each.
//!
//! `rust-prefix-sums [MEMBER_COUNT]`
//!
//! The task that a user starts is member 0. Member 0 spawns the other members, which run the same
//! program with the argument `member`. In each round, every member adds to its sum the sum of the
//! member at a certain distance before it. The distance is 1 in the first round and doubles in each
//! round.

use anyhow::{Context, Result, bail};
use libpvm::proto::Tid;
use libpvm::{Content, Notices, Vm};

/// Tag of a message with a final sum. Messages of the rounds have other tags: the tag is the
/// distance of the round, at least 1.
const TAG_SUM: i32 = 0;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg_texts: Vec<&str> = args.iter().map(String::as_str).collect();
    let vm = Vm::enroll()?;
    match arg_texts[..] {
        [] => run_first_member(&vm, 8)?,
        ["member", group, count] => {
            let instance = vm.join_group(group)?;
            run_member(&vm, group, instance, count.parse()?)?;
        }
        [count] => run_first_member(&vm, count.parse().context("not a number of members")?)?,
        _ => bail!("usage: rust-prefix-sums [MEMBERS]"),
    }
    Ok(vm.exit()?)
}

fn run_first_member(vm: &Vm, member_count: u32) -> Result<()> {
    if member_count < 2 {
        bail!("a group has two members or more");
    }
    // The tid in the name makes the group different from those of other runs. The first task that
    // joins gets instance number 0.
    let group = format!("prefix-sums-{}", vm.tid());
    let instance = vm.join_group(&group)?;
    let spawn_outcome = vm
        .spawner("rust-prefix-sums")
        .args(["member", &group, &member_count.to_string()])
        .count(member_count - 1)
        .start()?;
    if let Some(error) = spawn_outcome.failed.first() {
        for member in &spawn_outcome.tasks {
            member.kill()?;
        }
        return Err(*error).context("not all members were started");
    }
    let sums = run_member(vm, &group, instance, member_count)?;
    let sum_texts: Vec<String> = sums.iter().map(i64::to_string).collect();
    println!("{}", sum_texts.join(" "));
    Ok(())
}

/// Runs the algorithm of one member. Member 0 returns the sums of all members; all others return an
/// empty list.
fn run_member(vm: &Vm, group: &str, instance: i32, member_count: u32) -> Result<Vec<i64>> {
    // After this barrier all members have joined the group.
    vm.barrier(group, Some(member_count))?;
    let members: Option<Vec<Tid>> = vm.group_members(group)?.into_iter().collect();
    let members = members.context("a member has left the group")?;
    let other_members: Vec<Tid> = members
        .iter()
        .copied()
        .filter(|tid| *tid != vm.tid())
        .collect();
    let end_notices = vm.watch_tasks(&other_members)?;

    let own_index = usize::try_from(instance)?;
    let mut sum = i64::from(instance) + 1;
    let mut distance = 1;
    while distance < members.len() {
        let tag = i32::try_from(distance)?;
        if let Some(next_member) = members.get(own_index + distance) {
            vm.task(*next_member).send_value(tag, &sum)?;
        }
        if let Some(preceding_index) = own_index.checked_sub(distance) {
            sum += receive_number(vm, members[preceding_index], tag, &end_notices)?;
        }
        distance *= 2;
    }

    let mut sums = vec![];
    if own_index == 0 {
        sums.push(sum);
        for member in &members[1..] {
            sums.push(receive_number(vm, *member, TAG_SUM, &end_notices)?);
        }
    } else {
        vm.task(members[0]).send_value(TAG_SUM, &sum)?;
    }
    // No member ends before this barrier, so a member that still waits for a message does not lose
    // its sender.
    vm.barrier(group, Some(member_count))?;
    vm.leave_group(group)?;
    Ok(sums)
}

/// Waits for a message with this tag from a member. Returns the number in the message.
fn receive_number(vm: &Vm, member: Tid, tag: i32, end_notices: &Notices) -> Result<i64> {
    let is_expected = |src, message_tag| src == member && message_tag == tag;
    let message = vm.recv_where(|candidate| {
        is_expected(candidate.src, candidate.tag) || end_notices.is_notice_message(candidate)
    })?;
    if end_notices.is_notice_message(&message) {
        bail!("a member has ended before the group has done its work");
    }
    Ok(message.value()?)
}

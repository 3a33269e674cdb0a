//! What the account of a clone's server can do with what the server holds: nothing that the account could not do
//! before.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use onecopy_clone::fanotify::Group;
use onecopy_clone::service::{HYDRATOR_COMMAND, KEEPER_COMMAND};
use onecopy_clone::target::{PIN_DESCRIPTOR_NUMBER, VERSION_DESCRIPTOR_NUMBER};
use onecopy_postgres::{Server, processes_of};

use crate::primary::{ClonedPrimary, begin_clone, connect, end_clone, processes};

/// Told a file to write to, the number of fanotify_mark(2), and words by which our processes are known: what it has
/// open (`open`), and what it can do by that or by what other processes have open (`got`). The system calls with
/// numbers have these on all processors.
const INTRUDER: &str = r#"
use strict;
use POSIX ();
my ($path, $fanotify_mark, @words) = @ARGV;
# syscall takes for a number what was used as one.
$fanotify_mark += 0;
open my $out, '>', $path or die;
sub got { print $out "got: @_\n" }
sub attack {
    my ($number, $link) = ($_[0] + 0, $_[1]);
    my ($place, $numbers) = ('/etc', pack('l', 0) x 64);
    # FAN_MARK_ADD; FAN_OPEN | FAN_EVENT_ON_CHILD; AT_FDCWD.
    got("$link marks /etc") if syscall($fanotify_mark, $number, 1, 0x08000020, -100, $place) == 0;
    if ($link =~ /^anon_inode:\[(fanotify|io_uring)\]/) {
        got("$link is read") if defined POSIX::read($number, my $event, 4096) || $! != POSIX::EINVAL;
        got("$link is answered") if defined POSIX::write($number, pack('lL', 0x7fffffff, 1), 8) || $! != POSIX::EINVAL;
        got("$link is opened again") if defined POSIX::open("/proc/self/fd/$number", POSIX::O_RDWR);
        # io_uring_enter: nothing at all is submitted, taking the registered file out by FIXED_FD_INSTALL no more than
        # reading it.
        got("$link submits") if syscall(426, $number, 1, 0, 0, 0, 0) >= 0;
        for my $operation (0 .. 34) {
            got("$link registers $operation") if syscall(427, $number, $operation, $numbers, 1) >= 0;
            got("$link registers $operation of nothing") if syscall(427, $number, $operation, 0, 0) >= 0;
        }
    }
    if ($link =~ /memfd/) {
        got("$link is written") if defined POSIX::write($number, 'x', 1);
        my $again = POSIX::open("/proc/self/fd/$number", POSIX::O_RDWR);
        got("$link is opened and written") if defined $again && POSIX::write($again, 'x', 1);
        got("$link is cut") if truncate "/proc/self/fd/$number", 0;
    }
}
opendir my $own, '/proc/self/fd';
for my $number (sort { $a <=> $b } grep { /^\d+$/ } readdir $own) {
    my $link = readlink "/proc/self/fd/$number" or next;
    next if $link eq $path || $link =~ m{^/proc/\d+/fd$};
    print $out "open: $number $link\n";
    attack($number, $link);
}
for my $process (grep { $_ != $$ } map { m{/proc/(\d+)$} } glob '/proc/*') {
    my $line = join ' ', readlink("/proc/$process/cwd") // '',
        do { local (@ARGV, $/) = "/proc/$process/cmdline"; <> } // '';
    next unless grep { index($line, $_) >= 0 } @words;
    opendir my $descriptors, "/proc/$process/fd" or next;
    my $handle = syscall(434, $process + 0, 0);
    for my $number (grep { /^\d+$/ } readdir $descriptors) {
        my $link = readlink "/proc/$process/fd/$number" or next;
        got("process $process has $link") if $link =~ /fanotify/;
        # pidfd_getfd.
        my $copy = syscall(438, $handle, $number + 0, 0);
        next if $copy < 0;
        attack($copy, "$link of $process");
        POSIX::close($copy);
    }
    POSIX::close($handle);
}
got('the terminal') if open my $terminal, '<', '/dev/tty';
close $out;
"#;

/// Lays the program there and tells how it is called; what it finds comes into a file of that name.
fn intruder(primary: &ClonedPrimary, rendezvous: &Path, name: &str) -> (String, std::path::PathBuf) {
    let directory = primary.directory.path();
    let (script, found) = (directory.join("intruder.pl"), directory.join(name));
    std::fs::write(&script, INTRUDER).expect("written");
    std::fs::write(&found, "").expect("written");
    std::fs::set_permissions(&found, std::fs::Permissions::from_mode(0o666)).expect("its mode");
    let words = [&script, &found].map(|path| path.to_str().expect("UTF-8").to_owned());
    let [script, out] = words;
    let (place, met) = (directory.to_str().expect("UTF-8"), rendezvous.to_str().expect("UTF-8"));
    (format!("perl {script} {out} {} {place} {met}", libc::SYS_fanotify_mark), found)
}

/// What a program finds that a server's superuser lets it start.
async fn found_by_program_of(server: &Server, call: &str, found: &Path) -> String {
    let copy = format!("COPY (SELECT 1) TO PROGRAM '{call}'");
    connect(server).await.batch_execute(&copy).await.expect("the program runs");
    std::fs::read_to_string(found).expect("what it found")
}

/// Pipes and sockets that a process has open.
fn channels(process: impl std::fmt::Display) -> HashSet<String> {
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let links = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok());
    let links = links.map(|link| link.to_string_lossy().into_owned());
    links.filter(|link| link.starts_with("pipe:") || link.starts_with("socket:")).collect()
}

/// By nothing that a clone's server holds can PostgreSQL's account mark, read or answer anything, nor take away what
/// makes its reads wait (K9); where that cannot be had, `lazy` is not chosen, and refused with the remedy.
///
/// Spec: C4
#[tokio::test(flavor = "multi_thread")]
async fn k20_by_what_a_clones_server_holds_its_account_gets_nothing() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    let rendezvous = service.rendezvous().directory();

    // Control: so much is found where there is a group.
    let (call, found) = intruder(&primary, rendezvous, "found_with_a_group");
    let group = Stdio::from(OwnedFd::from(Group::new().expect("a group")));
    let mut words = call.split(' ');
    let mut control = clone.options().user.command(words.next().expect("perl"));
    assert!(control.args(words).stdin(group).status().expect("it runs").success());
    let found = std::fs::read_to_string(found).expect("what it found");
    for all in ["marks /etc", "is read", "is answered"] {
        assert!(found.contains(&format!("got: anon_inode:[fanotify] {all}")), "{all}: {found}");
    }

    for (server, inherited) in [
        (
            &clone,
            vec![(PIN_DESCRIPTOR_NUMBER, "anon_inode:[io_uring]"), (VERSION_DESCRIPTOR_NUMBER, "/memfd:onecopy-")],
        ),
        (&primary.server, Vec::new()),
    ] {
        let (call, found) = intruder(&primary, rendezvous, &format!("found_{}", inherited.len()));
        let found = found_by_program_of(server, &call, &found).await;
        assert!(!found.contains("got: "), "{found}");
        for (number, link) in &inherited {
            assert!(found.contains(&format!("open: {number} {link}")), "{number}: {found}");
        }
        // Nothing else but what is the server's own.
        let own = server.data_directory().parent().expect("a home").to_str().expect("UTF-8");
        for line in found.lines() {
            let (number, link) = line.strip_prefix("open: ").and_then(|open| open.split_once(' ')).expect(line);
            let is_own = ["/dev/null", "pipe:", "socket:", own].iter().any(|start| link.starts_with(start));
            let is_inherited = inherited.iter().any(|(known, _)| known.to_string() == number);
            assert!(is_own || is_inherited, "{line} of\n{found}");
        }
    }

    // Pipes and sockets of the servers are none of ours.
    let of_service = [KEEPER_COMMAND, HYDRATOR_COMMAND].into_iter().flat_map(|command| processes(&service, command));
    let ours: HashSet<String> = channels("self").into_iter().chain(of_service.flat_map(channels)).collect();
    assert!(!ours.is_empty());
    for server in [&clone, &primary.server] {
        let theirs: HashSet<String> = processes_of(server.data_directory()).into_iter().flat_map(channels).collect();
        assert!(!theirs.is_empty() && theirs.is_disjoint(&ours), "{theirs:?} and {ours:?}");
    }

    end_clone(&primary, &service, &plan, &clone).await;
}

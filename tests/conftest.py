"""What every test starts from, whoever runs them: a terminal, nohup, a CI runner."""

import signal

_JOB_CONTROL = (
    signal.SIGHUP,
    signal.SIGTERM,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGCONT,
)


def pytest_configure():
    """Ignored and blocked signals are inherited, and the tests send some."""
    for number in _JOB_CONTROL:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_JOB_CONTROL, signal.SIGINT))
